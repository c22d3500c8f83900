"""Rotation of queries and keys on the CPU by their positions: pairs as complex numbers.

zlm keeps the two dimensions of a rotary pair next to each other (the layout of the original Llama
code), not half a head apart as Hugging Face stores them: ``layers.rotary.interleave`` reorders the
rows of the q and k weights at load. Scores do not change, since q and k are reordered alike, and
the rotation of a whole merged QKV row is one complex product in place: values, and dimensions that
do not turn, are multiplied by one.
"""

import torch
from torch import Tensor


def factors(
    table: Tensor, positions: Tensor, num_rows: int, num_rotated: int, num_values: int
) -> Tensor:
    """Return what the rows of a merged QKV product are to be multiplied with, for a step.

    table: complex64 [max_model_len, D / 2]; positions: int64 [T]. The result, complex64
    [num_rows, heads * D / 2], turns the first ``num_rotated`` heads of a row (q and k) and leaves
    ``num_values`` heads (v) and rows from T on alone. A table of float32 is for q alone.
    """
    rotation = table.index_select(0, positions)
    heads, half = num_rotated + num_values, table.shape[1]
    if not table.is_complex():
        num_rotated -= num_values
    factor = torch.ones((num_rows, heads, half), dtype=torch.complex64, device=table.device)
    factor[: positions.shape[0], :num_rotated] = rotation.unsqueeze(1)
    return factor.view(num_rows, heads * half)


def rotate(qkv: Tensor, factor: Tensor) -> Tensor:
    """Return qkv [T', heads * D] times *factor* (see ``factors``); may be in place."""
    if qkv.dtype == torch.float32:
        qkv.view(torch.complex64).mul_(factor)
        return qkv
    wide = qkv.float()
    wide.view(torch.complex64).mul_(factor)
    return wide.to(qkv.dtype)
