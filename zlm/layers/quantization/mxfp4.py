"""MXFP4, as gpt-oss stores its experts: 4-bit floats with a power of two for 32 of them.

OCP Microscaling Formats (MX) 1.0. A code is sign, two bits of exponent and one of mantissa: 0, 0.5,
1, 1.5, 2, 3, 4, 6 and their negatives.

    blocks  uint8 [E, N, G, 16]     two codes a byte, the lower bits first
    scales  uint8 [E, N, G]         2 ** (scale - 127) for the 32 codes of a block
"""

import torch
from torch import Tensor

from zlm.ops.block_matrix import E2M1, BlockMatrix

BIAS = 127
PIECE_BLOCKS = 1 << 20  # dequantized at a time: 32 Mi values


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of all experts, bfloat16 [E, N, 32 G], which holds them exactly.

    Raises ValueError if the shapes do not agree.
    """
    _check(blocks, scales)
    experts, rows, groups, width = blocks.shape
    codes, exponents = blocks.view(-1, width), scales.view(-1, 1)
    values = torch.tensor(E2M1, device=blocks.device)
    out = torch.empty(len(codes), width, 2, dtype=torch.bfloat16, device=blocks.device)
    for start in range(0, len(codes), PIECE_BLOCKS):
        piece = slice(start, start + PIECE_BLOCKS)
        factors = torch.exp2(exponents[piece].float() - BIAS)
        for half, code in enumerate((codes[piece] & 15, codes[piece] >> 4)):
            out[piece, :, half] = (values[code.int()] * factors).to(torch.bfloat16)
    return out.view(experts, rows, groups * width * 2)


def matrix(blocks: Tensor, scales: Tensor) -> BlockMatrix:
    """Return the weights of all experts on top of each other, [E N, 32 G], as they are.

    Raises ValueError if the shapes do not agree.
    """
    _check(blocks, scales)
    codes = torch.stack((blocks & 15, blocks >> 4), -1)
    groups = blocks.shape[2]
    factors = torch.exp2(scales.float() - BIAS).view(-1, groups)
    return BlockMatrix(codes.view(len(factors), -1), factors, None, (1, 32), floats=True)


def _check(blocks: Tensor, scales: Tensor) -> None:
    if blocks.dim() != 4 or blocks.shape[:3] != scales.shape:
        raise ValueError(f"blocks and scales have shapes {[*blocks.shape]} and {[*scales.shape]}")
