"""A quantized checkpoint's tensors under the names of a plain one.

What a scheme stores as several tensors (``q_proj.qweight``, ``q_proj.scales``, ...) is one weight
here (``q_proj.weight``), dequantized when it is asked for; all else is as it was. Which scheme a
weight is of shows in the names of its parts; only GPTQ's two forms look alike, and are told apart
by the method that config.json names. Layouts are known to ``zlm.layers.quantization``.

Of rows or columns that are chosen no others are read, if they begin and end where every part of the
weight has an entry that does: else it is read whole, and cut.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from zlm.errors import ModelError
from zlm.layers.quantization import awq, gptq, packed, scaled
from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.cache_scales import NAMES, UNUSED, cache_scales
from zlm.weights.parts import chosen, chosen_matrix, read_tensor
from zlm.weights.region import Choose, Region, whole

if TYPE_CHECKING:
    from zlm.weights.load import FedFolderWeights, FolderWeights

SHAPE, ORDERS = "weight_shape", ("g_idx", "weight_g_idx")  # parts that are not cut as others are
WORD_CODES = 16  # that an entry has at most: one entry of more rows or columns is one for all


def evenly(size: int, entries: int, what: str) -> int:
    """Return how many of *size* rows or columns share each of *entries*."""
    if size % entries:
        raise ValueError(f"{entries} entries of {what} do not fit {size} rows or columns")
    return size // entries


class Scheme(NamedTuple):
    """How a weight is stored. The last of ``parts`` are its scales."""

    parts: tuple[str, ...]
    optional: tuple[str, ...]
    matrix: Callable[[Mapping[str, Tensor]], BlockMatrix]
    axes: Mapping[str, tuple[int, int]]  # dimensions of a part: the weight's rows, its columns
    shape: Callable[[Callable[[str], Sequence[int]]], tuple[int, int]] | None  # None: it is stored
    edge: Callable[[int, int, str], int] = evenly


def schemes(method: str) -> list[Scheme]:
    """Return how weights of a checkpoint of *method* (of ``quant_method``) may be stored."""
    if method == "awq":
        return [Scheme(awq.PARTS, awq.OPTIONAL, awq.matrix, awq.AXES, awq.shape)]
    if method in ("gptq", "gptq_v2"):
        read = partial(gptq.matrix, zero_shift=1 if method == "gptq" else 0)
        return [Scheme(gptq.PARTS, gptq.OPTIONAL, read, gptq.AXES, gptq.shape)]
    how = scaled.OPTIONAL, scaled.matrix, scaled.AXES, scaled.shape, scaled.edge
    return [
        Scheme(packed.PARTS, packed.OPTIONAL, packed.matrix, packed.AXES, None),
        Scheme((*scaled.PARTS, "weight_scale"), *how),
        Scheme((*scaled.PARTS, "weight_scale_inv"), *how),
    ]


class QuantizedWeights:
    """See ``zlm.weights.load.Weights``. Owns *stored*."""

    def __init__(
        self,
        stored: "FolderWeights | FedFolderWeights",
        method: str,
        *,
        static_inputs: bool = False,
    ) -> None:
        """Give weights of *stored*, which is quantized with *method*, in float32.

        static_inputs: activations are rounded by scales that are stored: they come with matrices.
        """
        self._stored = stored
        self._schemes = schemes(method)
        self._unused = () if static_inputs else scaled.INPUTS
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
                    names = {
                        p: full
                        for p, full in names.items()
                        if full in present and p not in self._unused
                    }
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
            return _plain(name, self._stored.get(name))
        matrix = self._matrix(name, *entry, whole)
        assert matrix is not None, "all can be read"
        return matrix.dequantize(torch.float32)

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return what *choose* names of tensor *name*, read alone if it can be."""
        if self._names[name] is None and name not in self._scales:
            return _plain(name, read_tensor(self._stored, name, choose))
        matrix = self.matrix(name, choose)
        return (
            chosen(self.get(name), choose) if matrix is None else matrix.dequantize(torch.float32)
        )

    def matrix(self, name: str, choose: Choose = whole) -> BlockMatrix | None:
        """Return what *choose* names of tensor *name* as it is quantized.

        None if it is not, or if that cannot be cut out of it.
        """
        entry = self._names[name]
        if entry is None:
            return None
        alone = self._matrix(name, *entry, choose)
        if alone is not None:
            return alone
        matrix = self._matrix(name, *entry, whole)
        return None if matrix is None else chosen_matrix(matrix, choose)

    def _matrix(
        self, name: str, scheme: Scheme, parts: dict[str, str], choose: Choose
    ) -> BlockMatrix | None:
        """Return what *choose* names of the weight *name*; None if that cannot be read alone."""
        try:
            tensors = self._read(scheme, parts, choose)
            return None if tensors is None else scheme.matrix(tensors)
        except ValueError as error:
            raise ModelError(f"the parts of the quantized {name} do not agree: {error}") from error

    def _read(
        self, scheme: Scheme, parts: dict[str, str], choose: Choose
    ) -> dict[str, Tensor] | None:
        """Return of each of *parts* what *choose* needs of the weight; None if it is not apart."""
        stored = self._stored
        shapes = {part: stored.shape(full) for part, full in parts.items()}
        if scheme.shape is not None:
            shape = scheme.shape(shapes.__getitem__)
        else:
            shape = tuple(stored.get(parts[SHAPE]).tolist())
        region = choose(shape)
        if region is None:
            return {part: stored.get(full) for part, full in parts.items()}
        if region.zeros:
            return None
        tensors = {}
        for part, full in parts.items():
            if part in ORDERS and region.dim == 1:
                groups = shapes[scheme.parts[-1]][scheme.axes[scheme.parts[-1]][1]]
                size = evenly(shape[1], groups, "scales")
                if gptq.group_order(stored.get(full), shape[1], size) is not None:
                    return None
                continue  # columns of a group are neighbours, and so are those of a part
            own = _choose_of_part(scheme, part, shapes[part], shape, region)
            if own is None:
                return None
            tensors[part] = stored.part(full, own)
        if SHAPE in tensors:
            tensors[SHAPE][region.dim] = sum(end - first for first, end in region.ranges)
        return tensors

    def close(self) -> None:
        self._stored.close()


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Return *tensor*, which is none of a scheme's: codes alone stand for no values."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor
    raise ModelError(f"tensor {name} is stored as {tensor.dtype}, and its scales are missing")


def _choose_of_part(
    scheme: Scheme, part: str, entries: Sequence[int], shape: Sequence[int], region: Region
) -> Choose | None:
    """Return what chooses of *part*, of shape *entries*, what belongs to *region* of the weight.

    None if that begins or ends within an entry, or if its blocks would not show in its size.
    """
    axis = scheme.axes[part][region.dim] if part in scheme.axes else len(entries)
    size = shape[region.dim]
    if axis >= len(entries) or (entries[axis] == 1 and size > WORD_CODES):
        return whole
    edge = scheme.edge(size, entries[axis], part)
    if any(end % edge and end != size for bounds in region.ranges for end in bounds):
        return None
    own = Region(axis, tuple((first // edge, -(-end // edge)) for first, end in region.ranges))
    taken, count = (sum(end - first for first, end in r.ranges) for r in (region, own))
    if count > 1 and scheme.edge(taken, count, part) != edge:
        return None
    return lambda _: own
