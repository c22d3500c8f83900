"""Dequantisation of GGUF's block formats to float32, exact to the bit.

A row of a matrix is a run of blocks; a block holds 32 or 256 small integers with their scales. Each
function here takes uint8 ``blocks`` [N, bytes of a block] and fills float32 ``out`` [N, values of a
block] in a few vector operations, with the products and sums in the order and precision of ggml's
reference code, so that results are equal and not merely near.

Work goes in pieces, so that the temporaries of a large matrix stay small. Measured on 2 idle cores,
all tensors of a file, with 2 threads and with 1: SmolLM2 135M in Q4_1 0.20 and 0.31 s, Gemma 3 270M
in Q4_K_M 0.47 and 0.65 s; pieces of 64 KiB 0.57 and 1.20 s with 2 threads.
"""

from collections.abc import Callable

import torch
from torch import Tensor

PIECE_VALUES = 1 << 20  # values dequantised at a time: 4 MiB of float32
GPU_PIECE_VALUES = 1 << 24  # on a GPU: few launches, temporaries of 64 MiB

_SCALE_BYTES = 12  # of a K block: eight 6-bit scales and eight 6-bit minima


def dequantize(raw: Tensor, type_name: str, out: Tensor) -> None:
    """Fill *out* with the values that *raw* encodes.

    raw: uint8 [bytes], contiguous.  type_name: of ``gguf.READABLE``.
    out: float32, contiguous, any shape with as many values as *raw* encodes, on *raw*'s device.
    """
    flat = out.view(-1)
    if type_name in PLAIN:
        flat.copy_(raw.view(PLAIN[type_name]))
        return
    values, block_bytes, fill = BLOCKS[type_name]
    blocks = raw.view(-1, block_bytes)
    rows = flat.view(-1, values)
    step = (GPU_PIECE_VALUES if raw.is_cuda else PIECE_VALUES) // values
    for start in range(0, blocks.shape[0], step):
        fill(blocks[start : start + step], rows[start : start + step])


def halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """Return the float16 numbers at byte *first* of each block as float32 [N, count]."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """Return [N, G, 2 * W] of the low, then the high halves of uint8 [N, G, W]."""
    return torch.cat((packed & 15, packed >> 4), dim=2)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[:, None, 2:])[:, 0]).sub_(8.0).mul_(halves(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scales = halves(blocks, 0, 2)
    out.copy_(nibbles(blocks[:, None, 4:])[:, 0]).mul_(scales[:, :1]).add_(scales[:, 1:])


def fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """Return uint8 [N, 32], 16 or 0: the fifth bit of each value, from the 4 bytes at *first*."""
    packed = blocks[:, first : first + 4, None]
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((packed >> shifts) & 1).view(-1, 32) << 4


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    values = nibbles(blocks[:, None, 6:])[:, 0] | fifth_bits(blocks, 2)
    out.copy_(values).sub_(16.0).mul_(halves(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    scales = halves(blocks, 0, 2)
    values = nibbles(blocks[:, None, 8:])[:, 0] | fifth_bits(blocks, 4)
    out.copy_(values).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(halves(blocks, 0))


def bits(packed: Tensor) -> Tensor:
    """Return [N, 8, W] of 0 and 1: the bits of uint8 [N, W], the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device).view(8, 1)
    return (packed.unsqueeze(1) >> shifts) & 1


def bit_pairs(packed: Tensor) -> Tensor:
    """Return [N, G, 4, W] of 0 to 3: the pairs of bits of uint8 [N, G, W], the lowest first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(4, 1)
    return (packed.unsqueeze(2) >> shifts) & 3


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of each 32 values of a Q4_K or Q5_K block, float32 [N, 8, 1].

    The first four of either are 6 bits of a byte; the other four are split: 4 bits in the last
    third, 2 bits in what the first two thirds leave free.
    """
    packed = blocks[:, 4 : 4 + _SCALE_BYTES]
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1)
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 6) << 4)), dim=1)
    factors = halves(blocks, 0, 2)
    return (
        (factors[:, :1] * scales.float()).unsqueeze(2),
        (factors[:, 1:] * minima.float()).unsqueeze(2),
    )


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = k_scales(blocks)
    values = nibbles(blocks[:, 16:].view(-1, 4, 32))
    out.copy_(values.view(-1, 256))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = k_scales(blocks)
    values = nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | bits(blocks[:, 16:48]) << 4
    out.copy_(values.view(-1, 256))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [N, 2, 4, 32] and scales float32 [N, 16] of Q6_K blocks.

    A block is two halves of 128 values: 64 bytes of low nibbles, 32 bytes of upper bit pairs.
    """
    low = blocks[:, :128].view(-1, 2, 64)
    upper = bit_pairs(blocks[:, 128:192].view(-1, 2, 32)) << 4
    scales = halves(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return nibbles(low).view(-1, 2, 4, 32) | upper, scales


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    codes, scales = six_bits(blocks)
    out.copy_(codes.view(-1, 256)).sub_(32.0)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def two_bits(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 [N, 16, 16], scales and minima float32 [N, 16] of Q2_K blocks."""
    factors, packed = halves(blocks, 80, 2), blocks[:, :16]
    codes = bit_pairs(blocks[:, 16:80].view(-1, 2, 32)).view(-1, 16, 16)
    return codes, factors[:, :1] * (packed & 15).float(), factors[:, 1:] * (packed >> 4).float()


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    codes, scales, minima = two_bits(blocks)
    out.copy_(codes.view(-1, 256))
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2))


def three_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [N, 8, 32], which are 4 more than they mean, and scales float32 [N, 16].

    Of Q3_K blocks: the third bits are apart, as are the two upper bits of the 6-bit scales.
    """
    low, high = nibbles(blocks[:, None, 96:104])[:, 0], bit_pairs(blocks[:, None, 104:108])
    scales = halves(blocks, 108) * (low | high.view(-1, 16) << 4).float().sub_(32.0)
    codes = bit_pairs(blocks[:, 32:96].view(-1, 2, 32)).view(-1, 8, 32)
    return codes | bits(blocks[:, :32]) << 2, scales


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    codes, scales = three_bits(blocks)
    out.copy_(codes.view(-1, 256)).sub_(4.0)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


# What the 4 bits of IQ4_NL and IQ4_XS stand for: closer steps where weights are many.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_values(packed: Tensor) -> Tensor:
    """Return int8 [N, G, 32]: the values of uint8 [N, G, 16]."""
    table = torch.tensor(IQ4_VALUES, dtype=torch.int8, device=packed.device)
    return table[nibbles(packed).int()]


def iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [N, 8, 32] and scales float32 [N, 8], which have 6 bits, of IQ4_XS blocks."""
    low = blocks[:, 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device)
    high = bit_pairs(blocks[:, 2:4, None]).view(-1, 8)
    scales = halves(blocks, 0) * (low.view(-1, 8) & 15 | high << 4).float().sub_(32.0)
    return iq4_values(blocks[:, 8:].view(-1, 8, 16)), scales


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    out.copy_(iq4_values(blocks[:, None, 2:])[:, 0]).mul_(halves(blocks, 0))


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    values, scales = iq4_xs(blocks)
    torch.mul(values, scales.unsqueeze(2), out=out.view(-1, 8, 32))


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS: dict[str, tuple[int, int, Callable[[Tensor, Tensor], None]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
}
