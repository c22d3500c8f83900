"""MXFP4, as gpt-oss stores its experts: 4-bit floats with a power of two for 32 of them.

OCP Microscaling Formats (MX) 1.0. A code is sign, two bits of exponent and one of mantissa: 0, 0.5,
1, 1.5, 2, 3, 4, 6 and their negatives.

    blocks  uint8 [E, N, G, 16]     two codes a byte, the lower bits first
    scales  uint8 [E, N, G]         2 ** (scale - 127) for the 32 codes of a block
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix

BIAS = 127
GROUP = 32  # codes of a block


def shape(blocks: Sequence[int], scales: Sequence[int]) -> tuple[int, int, int]:
    """Return E, N and 32 G of parts of these shapes. Raises ValueError if they do not agree."""
    if len(scales) != 3 or [*blocks] != [*scales, GROUP // 2]:
        raise ValueError(f"blocks and scales have shapes {[*blocks]} and {[*scales]}")
    return scales[0], scales[1], scales[2] * GROUP


def matrix(blocks: Tensor, scales: Tensor) -> BlockMatrix:
    """Return the weights of all experts on top of each other, [E N, 32 G], as they are.

    The least scale, 2 ** -127, is made 0, as that of padding is: with it none would fit float16.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1)
    factors = (torch.exp2(scales.float() - BIAS) * (scales > 0)).flatten(0, 1)
    return BlockMatrix(codes.view(len(factors), -1), factors, None, (1, GROUP), floats=True)
