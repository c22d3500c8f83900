"""AWQ's packed 4-bit weights ("gemm" version): Lin et al., arXiv:2306.00978.

    qweight  int32 [K, N/8]      8 codes of one column of K, of neighbouring rows of N
    qzeros   int32 [K/g, N/8]    likewise
    scales   float16 [K/g, N]

The codes of a word stand in the order 0 2 4 6 1 3 5 7, lowest bits first.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix, unpack

BITS = 4
PARTS = ("qweight", "qzeros", "scales")
OPTIONAL: tuple[str, ...] = ()
AXES = dict.fromkeys(PARTS, (1, 0))  # which of a part's dimensions are the weight's rows, columns
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of rows 0, 1, 2, ... in a word


def shape(shape_of: Callable[[str], Sequence[int]]) -> tuple[int, int]:
    """Return the weight's shape for the shapes of its parts."""
    columns, words = shape_of("qweight")
    return words * 32 // BITS, columns


def matrix(parts: Mapping[str, Tensor]) -> BlockMatrix:
    """Return the weight that *parts* store. Raises ValueError if their shapes do not agree."""
    codes, zeros = _rows(parts["qweight"]), _rows(parts["qzeros"])
    scales = parts["scales"].float()
    if scales.shape != zeros.shape or codes.shape[1] != zeros.shape[1]:
        raise ValueError(
            f"qweight, qzeros and scales have {codes.shape[1]}, {zeros.shape[1]} and "
            f"{scales.shape[-1]} rows, and {zeros.shape[0]} and {scales.shape[0]} groups"
        )
    columns, groups = codes.shape[0], scales.shape[0]
    if columns % groups:
        raise ValueError(f"{columns} columns are no whole number of {groups} groups")
    offsets = (zeros * scales).neg_()
    block = 1, columns // groups
    return BlockMatrix(codes.t().contiguous(), scales.t(), offsets.t(), block)


def _rows(words: Tensor) -> Tensor:
    """Return codes [..., N] of words [..., N/8]."""
    codes = unpack(words, BITS).view(*words.shape, 8)
    return codes[..., _PLACES.to(words.device)].flatten(-2)
