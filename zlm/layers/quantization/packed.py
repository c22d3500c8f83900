"""compressed-tensors' ``pack-quantized`` weights of 4 or 8 bits (W4A16, W8A16).

weight_packed      int32 [N, K * bits / 32]    codes + 2^(bits-1), lowest bits first
weight_shape       int64 [2]                   N and K
weight_scale       [N, K/g], or [N, 1]: a scale a row
weight_zero_point  int32 [N * bits / 32, K/g]  packed like the codes; absent if symmetric
weight_g_idx       int32 [K]                   with act-order: the group of each column
"""

from collections.abc import Mapping

from torch import Tensor

from zlm.layers.quantization.gptq import group_order
from zlm.ops.block_matrix import BlockMatrix, unpack

PARTS = ("weight_packed", "weight_shape", "weight_scale")
OPTIONAL = ("weight_zero_point", "weight_g_idx")
AXES = dict.fromkeys(("weight_packed", "weight_scale", "weight_zero_point"), (0, 1))
WIDTHS = (4, 8)


def matrix(parts: Mapping[str, Tensor]) -> BlockMatrix:
    """Return the weight that *parts* store. Raises ValueError if their shapes do not agree."""
    rows, columns = parts["weight_shape"].tolist()
    words, scales = parts["weight_packed"], parts["weight_scale"].float()
    bits = next((b for b in WIDTHS if words.shape == (rows, -(-columns * b // 32))), 0)
    if not bits:
        raise ValueError(
            f"weight_packed {list(words.shape)} holds no {rows} x {columns} codes of "
            f"{' or '.join(map(str, WIDTHS))} bits"
        )
    groups = scales.shape[1]
    if scales.shape[0] != rows or columns % groups:
        raise ValueError(f"weight_scale {list(scales.shape)} does not fit {rows} x {columns}")
    middle = 1 << (bits - 1)
    codes = unpack(words, bits)[:, :columns]
    zeros: Tensor | float = float(middle)
    if "weight_zero_point" in parts:
        packed = parts["weight_zero_point"].t().contiguous()
        zeros = unpack(packed, bits).t()[:rows].float()
        if zeros.shape != scales.shape:
            raise ValueError(f"weight_zero_point is for {list(zeros.shape)}, not the scales' shape")
    size = columns // groups
    order = group_order(parts.get("weight_g_idx"), columns, size)
    if order is not None:
        codes = codes[:, order]
    return BlockMatrix(codes.contiguous(), scales, (scales * zeros).neg_(), (1, size), order)
