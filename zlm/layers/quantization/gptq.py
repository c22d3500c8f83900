"""GPTQ's packed weights of 2, 4 or 8 bits: Frantar et al., arXiv:2210.17323.

    qweight  int32 [K * bits / 32, N]      codes of neighbouring columns of K, lowest bits first
    qzeros   int32 [K/g, N * bits / 32]    of neighbouring rows of N
    scales   float16 [K/g, N]
    g_idx    int32 [K]                     the group of each column

The first form of the format stores zeros less 1 (``gptq``), the second as they are (``gptq_v2``).
With act-order a group's columns are not neighbours.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix, unpack

PARTS = ("qweight", "qzeros", "scales")
OPTIONAL = ("g_idx",)
AXES = dict.fromkeys(PARTS, (1, 0))  # as AWQ's; g_idx is looked at as a whole
WIDTHS = (2, 4, 8)  # 3 bits straddle words


def shape(shape_of: Callable[[str], Sequence[int]]) -> tuple[int, int]:
    """Return the weight's shape for the shapes of its parts."""
    rows = shape_of("scales")[1]
    bits = max(1, 32 * shape_of("qzeros")[1] // rows)
    return rows, shape_of("qweight")[0] * 32 // bits


def matrix(parts: Mapping[str, Tensor], *, zero_shift: int) -> BlockMatrix:
    """Return the weight that *parts* store; *zero_shift* is added to the stored zeros.

    Raises ValueError if the shapes do not agree.
    """
    words, scales = parts["qweight"], parts["scales"].float()
    groups, rows = scales.shape
    bits = 32 * parts["qzeros"].shape[1] // rows
    if bits not in WIDTHS:
        raise ValueError(f"{bits}-bit codes; supported are {', '.join(map(str, WIDTHS))}")
    codes = unpack(words.t().contiguous(), bits)
    zeros = unpack(parts["qzeros"], bits)
    columns = codes.shape[1]
    if zeros.shape != scales.shape or codes.shape[0] != rows:
        raise ValueError(
            f"qweight has {codes.shape[0]} rows, qzeros {zeros.shape[1]} and scales {rows}"
        )
    size = -(-columns // groups)
    if size * groups != columns:
        raise ValueError(f"{columns} columns are no whole number of {groups} groups")
    order = group_order(parts.get("g_idx"), columns, size)
    if order is not None:
        codes = codes[:, order]
    offsets = (zeros.float() + zero_shift).mul_(scales).neg_()
    return BlockMatrix(codes, scales.t(), offsets.t(), (1, size), order)


def group_order(groups: Tensor | None, columns: int, size: int) -> Tensor | None:
    """Return the columns of the weight, group by group; None if they stand so already.

    groups: int32 [columns], each column's group. Raises ValueError unless every group has *size*
    columns.
    """
    if groups is None:
        return None
    expected = torch.arange(columns, device=groups.device) // size
    if torch.equal(groups.long(), expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order].long(), expected):
        raise ValueError(f"g_idx does not put {size} columns in every group")
    return order
