"""Weights of one byte each beside their scales: float8 (e4m3) and int8.

    weight             float8_e4m3fn or int8 [N, K]
    weight_scale       one value, [N] or [N, 1], [N, K/g], or a value a block
    weight_scale_inv   the same under DeepSeek's name (it is multiplied with all the same)
    weight_zero_point  int8, of the scales' shape; absent if symmetric
    input_scale        one value, of activations that are rounded to the same type; absent if each
                       row of them has its own (dynamic)
    input_zero_point   where that is not symmetric: then they are not rounded here

So store fp8 checkpoints of compressed-tensors (``float-quantized``), fbgemm, DeepSeek and Qwen,
and int8 ones of compressed-tensors (``int-quantized``).
"""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix

PARTS = ("weight",)
INPUTS = ("input_scale", "input_zero_point")
OPTIONAL = ("weight_scale", "weight_scale_inv", "weight_zero_point", *INPUTS)
IGNORED = (*INPUTS, "input_scale_ub", "output_scale", "activation_scale")
AXES = dict.fromkeys(("weight", "weight_scale", "weight_scale_inv", "weight_zero_point"), (0, 1))
BLOCKS = (128, 64, 32, 256)  # edges of blocks that are in use, the usual one first


def matrix(parts: Mapping[str, Tensor]) -> BlockMatrix:
    """Return the weight that *parts* store. Raises ValueError if their shapes do not agree."""
    codes = parts["weight"]
    scales = parts["weight_scale" if "weight_scale" in parts else "weight_scale_inv"].float()
    rows, columns = codes.shape
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    block = edge(rows, scales.shape[0], "rows"), edge(columns, scales.shape[1], "columns")
    offsets = None
    if "weight_zero_point" in parts:
        offsets = (parts["weight_zero_point"].float().reshape(scales.shape) * scales).neg_()
    return BlockMatrix(codes, scales, offsets, block, input_scale=_input_scale(parts))


def _input_scale(parts: Mapping[str, Tensor]) -> float:
    """Return the one scale of activations; 0 if there is none, or they are not symmetric."""
    if "input_scale" not in parts or (
        "input_zero_point" in parts and bool(parts["input_zero_point"].any())
    ):
        return 0.0
    scale = parts["input_scale"].float()
    if scale.numel() != 1 or not 0 < float(scale) < math.inf:
        raise ValueError(f"input_scale must be one positive number, got {scale.flatten().tolist()}")
    return float(scale)


def shape(shape_of: Callable[[str], Sequence[int]]) -> tuple[int, int]:
    """Return the weight's shape for the shapes of its parts."""
    rows, columns = shape_of("weight")
    return rows, columns


def edge(size: int, parts: int, what: str) -> int:
    """Return how many of *size* rows or columns share each of *parts* scales."""
    if parts == 1:
        return size
    if parts == size:
        return 1
    for usual in BLOCKS:
        if -(-size // usual) == parts:
            return usual
    if size % parts == 0:
        return size // parts
    raise ValueError(f"{parts} scales do not fit {size} {what}")
