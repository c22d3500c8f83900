"""Weights of one byte each beside their scales: float8 (e4m3) and int8.

    weight             float8_e4m3fn or int8 [N, K]
    weight_scale       one value, [N] or [N, 1], [N, K/g], or a value a block
    weight_scale_inv   the same under DeepSeek's name (it is multiplied with all the same)
    weight_zero_point  int8, of the scales' shape; absent if symmetric

So store fp8 checkpoints of compressed-tensors (``float-quantized``), fbgemm, DeepSeek and Qwen,
and int8 ones of compressed-tensors (``int-quantized``). What activations were to be rounded to
(``input_scale``) does not change the weight.
"""

from collections.abc import Mapping

from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix

PARTS = ("weight",)
OPTIONAL = ("weight_scale", "weight_scale_inv", "weight_zero_point")
IGNORED = ("input_scale", "input_scale_ub", "output_scale", "activation_scale", "input_zero_point")
BLOCKS = (128, 64, 32, 256)  # edges of blocks that are in use, the usual one first


def matrix(parts: Mapping[str, Tensor]) -> BlockMatrix:
    """Return the weight that *parts* store. Raises ValueError if their shapes do not agree."""
    codes = parts["weight"]
    scales = parts["weight_scale" if "weight_scale" in parts else "weight_scale_inv"].float()
    rows, columns = codes.shape
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    block = _edge(rows, scales.shape[0], "rows"), _edge(columns, scales.shape[1], "columns")
    offsets = None
    if "weight_zero_point" in parts:
        offsets = (parts["weight_zero_point"].float().reshape(scales.shape) * scales).neg_()
    return BlockMatrix(codes, scales, offsets, block)


def _edge(size: int, parts: int, what: str) -> int:
    """Return how many of *size* rows or columns share each of *parts* scales."""
    if parts == 1:
        return size
    if parts == size:
        return 1
    for edge in BLOCKS:
        if -(-size // edge) == parts:
            return edge
    if size % parts == 0:
        return size // parts
    raise ValueError(f"{parts} scales do not fit {size} {what}")
