"""Random weights in a checkpoint's place (``--load-format dummy``): for speed without a download.

Has the reading side of a checkpoint, as ``zlm.weights.load`` opens them. Every tensor is made when
it is asked for, from the seed and its name: the same in every process. A GPU draws its own numbers,
where they are wanted: 8 billion of them take it no time.
"""

from zlib import crc32

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.models.tensors import expected_tensors

STANDARD_DEVIATION = 0.02
CPU = torch.device("cpu")


class DummyWeights:
    """The tensors of a checkpoint of *spec*, drawn from a normal distribution, float32."""

    def __init__(self, spec: ModelSpec, seed: int, device: torch.device = CPU) -> None:
        self._shapes = expected_tensors(spec)
        self._norm = 0.0 if spec.norm_plus_one else 1.0
        self._seed = seed & 0xFFFFFFFF
        self._device = device

    def names(self) -> list[str]:
        return list(self._shapes)

    def get(self, name: str) -> Tensor:
        """Return tensor *name*; norms are neutral. Raises KeyError if the model has none such."""
        shape = self._shapes[name]
        if name.lower().endswith("norm.weight"):
            return torch.full(shape, self._norm, device=self._device)
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode(), self._seed))
        values = torch.randn(shape, generator=generator, device=self._device)
        return values.mul_(STANDARD_DEVIATION)
