"""A quantized weight in the one form that every scheme is brought to when it is read.

Codes are small integers, 8-bit floats or numbers of 4-bit floats, and blocks of them share a scale:

    w[n, order[k]] = codes[n, k] * scales[n // R, k // C] + offsets[n // R, k // C]

R x C is the block: 1 x 128 for AWQ and GPTQ, 128 x 128 for DeepSeek's float8, 1 x K for a scale a
row, N x K for one scale. Offsets are what zero points come to: -zero * scale. ``order`` is there
only if blocks were not formed from neighbours (GPTQ's act-order).

Knows nothing of checkpoints, whose layouts ``zlm.layers.quantization`` undoes, and nothing of
products.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

INT8_MAX = 127
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))  # sign, two bits of exponent and one of fraction
PIECE_VALUES = 1 << 22  # weights dequantized at a time: 16 MiB of float32


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A weight [N, K]: codes [N, K] of any small type, scales and offsets float32 [N/R, K/C]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    block: tuple[int, int]  # R rows and C columns share a scale; the last ones may be fewer
    order: Tensor | None = None  # int64 [K], a permutation: the weight's column of each of codes
    floats: bool = False  # codes stand for the numbers of E2M1
    # What rows that it multiplies are divided by before they are rounded to the codes' type, where
    # the checkpoint says so (static activation scales); 0: nothing.
    input_scale: float = 0.0

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in *dtype*, computed in float32."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.codes.device)
        piece = max(1, PIECE_VALUES // columns)
        piece += -piece % self.block[0] if self.block[0] < rows else 0
        for start in range(0, rows, piece):
            end = min(start + piece, rows)
            values = self.codes[start:end].float()
            if self.floats:
                values = torch.tensor(E2M1, device=values.device)[values.long()]
            values *= self._spread(self.scales, start, end)
            if self.offsets is not None:
                values += self._spread(self.offsets, start, end)
            if self.order is None:
                out[start:end] = values
            else:
                out[start:end, self.order] = values.to(dtype)
        return out

    def by_rows(self) -> "BlockMatrix":
        """Return the same weight with blocks of one row, whose scales are repeated."""
        edge, count = self.block[0], self.shape[0]
        if edge == 1:
            return self

        def repeated(shared: Tensor) -> Tensor:
            return shared.repeat_interleave(edge, 0)[:count]

        offsets = None if self.offsets is None else repeated(self.offsets)
        block = 1, self.block[1]
        return replace(self, scales=repeated(self.scales), offsets=offsets, block=block)

    def rows(self, index: Tensor) -> "BlockMatrix":
        """Return the rows *index*, int64 [M], each of which must have blocks of its own."""
        assert self.block[0] == 1, "a block holds several rows"
        offsets = None if self.offsets is None else self.offsets[index]
        scales = self.scales[index]
        codes = self.codes.view(torch.uint8)[index].view(self.codes.dtype)  # float8, too
        return replace(self, codes=codes, scales=scales, offsets=offsets)

    def _spread(self, shared: Tensor, start: int, end: int) -> Tensor:
        """Return *shared*, a value a block, for each code of rows *start* to *end*."""
        block_rows, block_columns = self.block
        rows = torch.arange(start, end, device=shared.device) // block_rows
        return shared[rows].repeat_interleave(block_columns, 1)[:, : self.codes.shape[1]]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned *bits*-bit codes in int32 *words* [..., W], lowest bits first.

    The result is uint8 [..., W * 32 / bits]. bits: 2, 4 or 8.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


class Rows(Protocol):
    """Something that has the rows of a weight, such as a ``BlockMatrix``."""

    def rows(self, index: Tensor) -> BlockMatrix:
        """Return the rows *index*, int64 [M]."""


# A weight as a layer takes it: a tensor in the compute type, or quantized, if its ops take that.
Weight = Tensor | BlockMatrix


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return *weight* as a tensor: if it is quantized, in *dtype*."""
    return weight.dequantize(dtype) if isinstance(weight, BlockMatrix) else weight


def stack(weights: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Return *weights* on top of each other: quantized if they can be, else in *dtype*.

    Codes that differ in form get the finest blocks of all, and a byte each.
    """
    matrices = [weight.by_rows() for weight in weights if isinstance(weight, BlockMatrix)]
    if len(matrices) < len(weights) or not _can_stand_together(matrices):
        return torch.cat([plain(weight, dtype) for weight in weights])
    columns = math.gcd(*(m.block[1] for m in matrices))
    finer = [_with_columns(m, columns) for m in matrices]
    offsets, inputs = None, [m.input_scale for m in finer]
    if any(m.offsets is not None for m in finer):
        offsets = torch.cat(
            [torch.zeros_like(m.scales) if m.offsets is None else m.offsets for m in finer]
        )
    return replace(
        finer[0],
        codes=_stacked([m.codes for m in finer]),
        scales=torch.cat([m.scales for m in finer]),
        offsets=offsets,
        input_scale=max(inputs) if all(inputs) else 0.0,
    )


def _can_stand_together(matrices: Sequence[BlockMatrix]) -> bool:
    """Whether rows of all of *matrices*, of blocks of one row, can stand in one."""
    first = matrices[0]
    if not all(
        _same_order(m.order, first.order)
        and m.shape[1] % m.block[1] == 0
        and m.floats == first.floats
        for m in matrices
    ):
        return False
    types = {m.codes.dtype for m in matrices}
    return len(types) == 1 or (
        not any(dtype.is_floating_point for dtype in types)
        and all(int(m.codes.max()) <= INT8_MAX for m in matrices)
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _with_columns(matrix: BlockMatrix, columns: int) -> BlockMatrix:
    """Return *matrix* with blocks of *columns* columns, a divisor of what they have."""
    times = matrix.block[1] // columns
    if times == 1:
        return matrix
    scales = matrix.scales.repeat_interleave(times, 1)
    offsets = None if matrix.offsets is None else matrix.offsets.repeat_interleave(times, 1)
    return replace(matrix, scales=scales, offsets=offsets, block=(1, columns))


def _stacked(codes: Sequence[Tensor]) -> Tensor:
    """Return *codes*, of one type or integers up to 127, on top of each other."""
    dtype = codes[0].dtype
    if any(each.dtype != dtype for each in codes):
        return torch.cat([each.to(torch.int8) for each in codes])
    return torch.cat([each.view(torch.uint8) for each in codes]).view(dtype)


def take_rows(weight: Weight, index: Tensor) -> Weight:
    """Return the rows *index*, int64 [M], of *weight*."""
    return weight.rows(index) if isinstance(weight, BlockMatrix) else weight[index]
