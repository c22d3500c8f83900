"""GGUF's quantized tensors as ``BlockMatrix``: their codes, with scales and offsets as float32.

The codes are the file's; only how they are packed differs. See ``gguf_dequant`` for the formats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.gguf_dequant import (
    BLOCKS,
    bits,
    fifth_bits,
    halves,
    iq4_values,
    iq4_xs,
    k_scales,
    nibbles,
    six_bits,
    three_bits,
    two_bits,
)

# Codes uint8 or int8 [N, values], scales and offsets float32 [N, groups].
Parts = tuple[Tensor, Tensor, Tensor | None]


def matrix(raw: Tensor, type_name: str, shape: tuple[int, int]) -> BlockMatrix:
    """Return the tensor of *shape* that *raw*, uint8 [bytes], encodes; *type_name* is in PARTS."""
    rows, columns = shape
    block_bytes = BLOCKS[type_name][1]
    codes, scales, offsets = PARTS[type_name](raw.view(-1, block_bytes))
    scales = scales.reshape(rows, -1)
    if offsets is not None:
        offsets = offsets.reshape(rows, -1)
    block = 1, columns // scales.shape[1]
    return BlockMatrix(codes.reshape(rows, columns), scales, offsets, block)


def _q4_0(blocks: Tensor) -> Parts:
    scales = halves(blocks, 0)
    return nibbles(blocks[:, None, 2:]), scales, scales * -8.0


def _q4_1(blocks: Tensor) -> Parts:
    scales = halves(blocks, 0, 2)
    return nibbles(blocks[:, None, 4:]), scales[:, 0], scales[:, 1]


def _q5_0(blocks: Tensor) -> Parts:
    scales = halves(blocks, 0)
    return nibbles(blocks[:, None, 6:])[:, 0] | fifth_bits(blocks, 2), scales, scales * -16.0


def _q5_1(blocks: Tensor) -> Parts:
    scales = halves(blocks, 0, 2)
    codes = nibbles(blocks[:, None, 8:])[:, 0] | fifth_bits(blocks, 4)
    return codes, scales[:, 0], scales[:, 1]


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), halves(blocks, 0), None


def _q4_k(blocks: Tensor) -> Parts:
    scales, minima = k_scales(blocks)
    return nibbles(blocks[:, 16:].view(-1, 4, 32)), scales, -minima


def _q5_k(blocks: Tensor) -> Parts:
    scales, minima = k_scales(blocks)
    fifth = bits(blocks[:, 16:48]) << 4
    return nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | fifth, scales, -minima


def _q6_k(blocks: Tensor) -> Parts:
    codes, scales = six_bits(blocks)
    return codes, scales, scales * -32.0


def _q2_k(blocks: Tensor) -> Parts:
    codes, scales, minima = two_bits(blocks)
    return codes, scales, -minima


def _q3_k(blocks: Tensor) -> Parts:
    codes, scales = three_bits(blocks)
    return codes, scales, scales * -4.0


def _iq4_nl(blocks: Tensor) -> Parts:
    return iq4_values(blocks[:, None, 2:]), halves(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Parts:
    return *iq4_xs(blocks), None


PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
