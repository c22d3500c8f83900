"""A quantized checkpoint's tensors under the names of a plain one.

What a scheme stores as several tensors (``q_proj.qweight``, ``q_proj.scales``, ...) is one weight
here (``q_proj.weight``), dequantized when it is asked for; all else is as it was. Which scheme a
weight is of shows in the names of its parts; only GPTQ's two forms look alike, and are told apart
by the method that config.json names. Layouts are known to ``zlm.layers.quantization``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from zlm.errors import ModelError
from zlm.layers.quantization import awq, gptq, packed, scaled
from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.cache_scales import NAMES, UNUSED, cache_scales
from zlm.weights.parts import chosen, read_tensor
from zlm.weights.region import Choose

if TYPE_CHECKING:
    from zlm.weights.load import Weights


class Scheme(NamedTuple):
    """How a weight is stored."""

    parts: tuple[str, ...]
    optional: tuple[str, ...]
    matrix: Callable[[Mapping[str, Tensor]], BlockMatrix]


def schemes(method: str) -> list[Scheme]:
    """Return how weights of a checkpoint of *method* (of ``quant_method``) may be stored."""
    if method == "awq":
        return [Scheme(awq.PARTS, awq.OPTIONAL, awq.matrix)]
    if method in ("gptq", "gptq_v2"):
        read = partial(gptq.matrix, zero_shift=1 if method == "gptq" else 0)
        return [Scheme(gptq.PARTS, gptq.OPTIONAL, read)]
    return [
        Scheme(packed.PARTS, packed.OPTIONAL, packed.matrix),
        Scheme((*scaled.PARTS, "weight_scale"), scaled.OPTIONAL, scaled.matrix),
        Scheme((*scaled.PARTS, "weight_scale_inv"), scaled.OPTIONAL, scaled.matrix),
    ]


class QuantizedWeights:
    """See ``zlm.weights.load.Weights``. Owns *stored*."""

    def __init__(self, stored: "Weights", method: str) -> None:
        """Give weights of *stored*, which is quantized with *method*, in float32."""
        self._stored = stored
        self._schemes = schemes(method)
        self._names: dict[str, tuple[Scheme, dict[str, str]] | None] = {}
        self._find()

    def _find(self) -> None:
        """See which stored tensors are one weight."""
        found = self._stored.names()
        present = set(found)
        surplus = {*scaled.IGNORED, *NAMES, *UNUSED, "kv_scale"}
        parts_of: dict[str, str] = {}
        for name in found:
            base, _, part = name.rpartition(".")
            for scheme in self._schemes:
                if part == scheme.parts[0] and all(f"{base}.{p}" in present for p in scheme.parts):
                    names = {p: f"{base}.{p}" for p in (*scheme.parts, *scheme.optional)}
                    names = {p: full for p, full in names.items() if full in present}
                    parts_of |= dict.fromkeys(names.values(), base)
                    self._names[f"{base}.weight"] = scheme, names
        for name in found:
            if name not in parts_of and name.rpartition(".")[2] not in surplus:
                self._names[name] = None
        self._scales = cache_scales(found)
        self._names |= dict.fromkeys(self._scales)

    def names(self) -> list[str]:
        return list(self._names)

    def get(self, name: str) -> Tensor:
        entry = self._names[name]
        if name in self._scales:
            return self._stored.get(self._scales[name]).flatten()
        if entry is None:
            return self._stored.get(name)
        return self._matrix(name, *entry).dequantize(torch.float32)

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return what *choose* names of tensor *name*: of one that is not quantized, no more."""
        entry = self._names[name]
        if entry is None and name not in self._scales:
            return read_tensor(self._stored, name, choose)
        return chosen(self.get(name), choose)

    def _matrix(self, name: str, scheme: Scheme, parts: dict[str, str]) -> BlockMatrix:
        tensors = {part: self._stored.get(full) for part, full in parts.items()}
        try:
            return scheme.matrix(tensors)
        except ValueError as error:
            raise ModelError(f"the parts of the quantized {name} do not agree: {error}") from error

    def matrix(self, name: str) -> BlockMatrix | None:
        """Return tensor *name* as it is quantized; None if it is not."""
        entry = self._names[name]
        return None if entry is None else self._matrix(name, *entry)

    def close(self) -> None:
        self._stored.close()
