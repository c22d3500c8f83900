"""A plain checkpoint, quantized as it is read (``--quantization fp8`` or ``w4a16``).

Only the products of the layers are: embedding, head, norms and routers stay as they are.

    fp8      float8 (e4m3), a scale a row of the weight
    w4a16    4 bits, a scale for each 128 columns (64 or 32 where 128 do not fit), zero at 8
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.parts import part_of_matrix, read_tensor
from zlm.weights.region import Choose, Region, whole

PRODUCTS = "_proj.weight"  # how the names of what is quantized end
E4M3_MAX = 448.0
GROUPS = (128, 64, 32)


class PlainWeights(Protocol):
    """A checkpoint as far as it is needed here."""

    def names(self) -> Iterable[str]: ...

    def get(self, name: str) -> Tensor: ...


class OnlineQuantized:
    """The tensors of a checkpoint, which is its caller's to close."""

    def __init__(self, stored: PlainWeights, kind: str) -> None:
        """Quantize products of *stored* as *kind*, fp8 or w4a16."""
        self._stored = stored
        self._kind = kind

    def names(self) -> Iterable[str]:
        return self._stored.names()

    def get(self, name: str) -> Tensor:
        return self._stored.get(name)

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return what *choose* names of tensor *name*."""
        return read_tensor(self._stored, name, choose)

    def matrix(self, name: str, choose: Choose = whole) -> BlockMatrix | None:
        """Return what *choose* names of *name*, quantized; None if it stays as it is.

        A row's scale is of all its columns: no other rows are read, but whole ones.
        """
        if not name.endswith(PRODUCTS):
            return None
        found: list[Region | None] = []

        def rows(shape: Sequence[int]) -> Region | None:
            found.append(choose(shape))
            return None if found[0] is None or found[0].dim else found[0]

        tensor = read_tensor(self._stored, name, rows)
        if tensor.dim() != 2:
            return None
        matrix = float8(tensor.float()) if self._kind == "fp8" else four_bits(tensor.float())
        region = found[0]
        if matrix is None or region is None or region.dim == 0:
            return matrix
        return part_of_matrix(matrix, region)


def float8(weight: Tensor) -> BlockMatrix:
    """Return *weight*, float32 [N, K], in float8 with a scale a row."""
    scales = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).clamp_(min=1e-12)
    codes = (weight / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return BlockMatrix(codes, scales, None, (1, weight.shape[1]))


def four_bits(weight: Tensor) -> BlockMatrix | None:
    """Return *weight*, float32 [N, K], in 4 bits; None if no size of group fits K."""
    rows, columns = weight.shape
    group = next((size for size in GROUPS if columns % size == 0), 0)
    if not group:
        return None
    groups = weight.view(rows, -1, group)
    scales = (groups.abs().amax(2) / 7).clamp_(min=1e-12)
    codes = (groups / scales.unsqueeze(2)).round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return BlockMatrix(codes.view(rows, columns), scales, scales * -8, (1, group))
