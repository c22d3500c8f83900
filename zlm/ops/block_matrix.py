"""A quantized weight in the one form that every scheme is brought to when it is read.

Codes are small integers or 8-bit floats, and blocks of them share a scale:

    w[n, order[k]] = codes[n, k] * scales[n // R, k // C] + offsets[n // R, k // C]

R x C is the block: 1 x 128 for AWQ and GPTQ, 128 x 128 for DeepSeek's float8, 1 x K for a scale a
row, N x K for one scale. Offsets are what zero points come to: -zero * scale. ``order`` is there
only if blocks were not formed from neighbours (GPTQ's act-order).

Knows nothing of checkpoints, whose layouts ``zlm.layers.quantization`` undoes, and nothing of
products.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PIECE_VALUES = 1 << 22  # weights dequantized at a time: 16 MiB of float32


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A weight [N, K]: codes [N, K] of any small type, scales and offsets float32 [N/R, K/C]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    block: tuple[int, int]  # R rows and C columns share a scale; the last ones may be fewer
    order: Tensor | None = None  # int64 [K], a permutation: the weight's column of each of codes

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
            values *= self._spread(self.scales, start, end)
            if self.offsets is not None:
                values += self._spread(self.offsets, start, end)
            if self.order is None:
                out[start:end] = values
            else:
                out[start:end, self.order] = values.to(dtype)
        return out

    def rows(self, index: Tensor) -> "BlockMatrix":
        """Return the rows *index*, int64 [M], each of which must have blocks of its own."""
        assert self.block[0] == 1, "a block holds several rows"
        offsets = None if self.offsets is None else self.offsets[index]
        scales = self.scales[index]
        return replace(self, codes=self.codes[index], scales=scales, offsets=offsets)

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


# A weight as a layer takes it: a tensor in the compute type, or quantized, if its ops take that.
Weight = Tensor | BlockMatrix


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return *weight* as a tensor: if it is quantized, in *dtype*."""
    return weight.dequantize(dtype) if isinstance(weight, BlockMatrix) else weight


def stack(weights: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Return *weights* on top of each other: quantized if all are, and alike, else in *dtype*."""
    matrices = [weight for weight in weights if isinstance(weight, BlockMatrix)]
    if len(matrices) < len(weights) or not _are_alike(matrices):
        return torch.cat([plain(weight, dtype) for weight in weights])
    offsets = None
    if matrices[0].offsets is not None:
        offsets = torch.cat([m.offsets for m in matrices if m.offsets is not None])
    return replace(
        matrices[0],
        codes=torch.cat([m.codes for m in matrices]),
        scales=torch.cat([m.scales for m in matrices]),
        offsets=offsets,
    )


def _are_alike(matrices: Sequence[BlockMatrix]) -> bool:
    """Whether rows of all of *matrices* can stand in one."""
    first = matrices[0]
    return all(
        m.block == first.block
        and m.block[0] == 1
        and m.order is None
        and m.codes.dtype == first.codes.dtype
        and (m.offsets is None) == (first.offsets is None)
        for m in matrices
    )


def take_rows(weight: Weight, index: Tensor) -> Weight:
    """Return the rows *index*, int64 [M], of *weight*."""
    return weight.rows(index) if isinstance(weight, BlockMatrix) else weight[index]
