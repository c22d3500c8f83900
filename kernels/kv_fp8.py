"""Keys and values kept in 8 bits (e4m3): how they are rounded, and what kernels read them as.

A key is stored as ``fp8(k / scale)`` and a value alike, each KV head with a scale of its own:
float32 [2, Hkv], keys first, or none at all, which is 1. Nobody multiplies a key: the keys' scale
is a factor of the softmax's, the values' one of the result.

Attention multiplies in float16 whatever 16-bit type the model computes in: every e4m3 number is a
float16 number, cards from sm89 on turn two of them in one instruction (bfloat16 takes three), and
a weight of a softmax, at most 1, is finer in float16. So queries become float16 too; a query beyond
its range would have made its softmax a choice of one key.

Kernels read *pairs*: the numbers of dimensions 2 i and 2 i + 1 as one uint16, so that a tile moves
through shared memory as one of bfloat16 does, transposed where it must be, which hardware does for
16 bits and not for 8. A product is then that of the even dimensions plus that of the odd ones, and
a result has its even and its odd dimensions apart until it is stored.

Older cards have no such instruction: there the bits are moved, s eeee mmm to s 0eeee mmm0000000,
which is the number over 256, subnormals included.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LARGEST_HALF = tl.constexpr(65_504.0)
NATIVE_CAPABILITY = (8, 9)
# Two pairs stand in a register: their first numbers, or their second ones, as two float16.
CONVERT = """
    {
    .reg .b32 both;
    .reg .b16 first, second;
    prmt.b32 both, $1, 0, 0x3120;
    mov.b32 {first, second}, both;
    cvt.rn.f16x2.e4m3x2 $0, %s;
    }
"""
CONVERT_BOTH = tl.constexpr("cvt.rn.f16x2.e4m3x2 $0, $1;")
CONVERT_FIRST = tl.constexpr(CONVERT % "first")
CONVERT_SECOND = tl.constexpr(CONVERT % "second")
# How a kernel reads the cache, its READ: as numbers of the queries' type, or as pairs.
PLAIN, NATIVE, BITS = 0, 1, 2


def reading(cache: Tensor) -> tuple[Tensor, int, float]:
    """Return the cache as kernels take it, their READ, and what a number read is to be times."""
    if cache.dtype != FP8:
        return cache, PLAIN, 1.0
    is_new = cache.device.type == "cuda" and (
        torch.cuda.get_device_capability(cache.device) >= NATIVE_CAPABILITY
    )
    return cache.view(torch.uint16), *((NATIVE, 1.0) if is_new else (BITS, 256.0))


def rounded(x: Tensor) -> Tensor:
    """Return *x* as e4m3, the largest for what is beyond; the reference of ``code``."""
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def dequantized(cache: Tensor, blocks: Tensor, kv_scales: Tensor | None) -> Tensor:
    """Return keys and values of *blocks*, float64 [2, Hkv, tokens, D]; for references."""
    stored = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    both = stored[blocks].view(cache.dtype).double().permute(2, 1, 0, 3, 4).flatten(2, 3)
    return both if kv_scales is None else both * kv_scales.double()[:, :, None, None]


@triton.jit
def half_of_query(b_q):
    """Return queries [M, D] as they meet keys of e4m3: in float16, unless they are float32."""
    if b_q.dtype != tl.float32:
        b_q = tl.minimum(tl.maximum(b_q.to(tl.float32), -LARGEST_HALF), LARGEST_HALF)
        b_q = b_q.to(tl.float16)
    return b_q


@triton.jit
def halves_of_query(b_q):
    """Return the even and the odd dimensions of queries [M, D], as they meet keys of e4m3."""
    return tl.split(tl.reshape(half_of_query(b_q), (b_q.shape[0], b_q.shape[1] // 2, 2)))


@triton.jit
def _converted(b_pairs, ASM: tl.constexpr):
    """Return one number of each pair as float16, by the card's own instruction."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r", [b_pairs], dtype=tl.float16, is_pure=True, pack=2
    )  # fmt: skip


@triton.jit
def even(b_pairs, b_q, READ: tl.constexpr):
    """Return the first number of each pair, in the type of the queries *b_q*."""
    if READ == 1:
        b_number = _converted(b_pairs, CONVERT_FIRST)
    else:
        b_bits = ((b_pairs & 0x80) << 8) | ((b_pairs & 0x7F) << 7)
        b_number = b_bits.to(tl.float16, bitcast=True)
    return b_number.to(b_q.dtype)


@triton.jit
def odd(b_pairs, b_q, READ: tl.constexpr):
    """Return the second number of each pair, in the type of the queries *b_q*."""
    if READ == 1:
        b_number = _converted(b_pairs, CONVERT_SECOND)
    else:
        b_bits = (b_pairs & 0x8000) | ((b_pairs & 0x7F00) >> 1)
        b_number = b_bits.to(tl.float16, bitcast=True)
    return b_number.to(b_q.dtype)


@triton.jit
def both(b_pairs, READ: tl.constexpr):
    """Return the two numbers of each pair as two float16 in an int32, the first one low."""
    if READ == 1:
        b_numbers = tl.inline_asm_elementwise(
            CONVERT_BOTH, "=r,h", [b_pairs], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        b_wide = b_pairs.to(tl.uint32)
        b_low = ((b_wide & 0x80) << 8) | ((b_wide & 0x7F) << 7)
        b_high = ((b_wide & 0x8000) << 16) | ((b_wide & 0x7F00) << 15)
        b_numbers = (b_low | b_high).to(tl.int32, bitcast=True)
    return b_numbers


@triton.jit
def code(b_x):
    """Return finite float32 *b_x* rounded to e4m3, ties to even, as the bits: uint8."""
    b_bits = tl.abs(b_x).to(tl.uint32, bitcast=True)
    b_sign = (b_x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    # Below 2^-6 steps are of 2^-9: added to 2^14, whose last bit is that, float32 rounds them.
    b_small = (tl.abs(b_x) + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    # Above, 20 of 23 bits of the mantissa go, and the exponent's bias is 7 and no longer 127.
    b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
    b_code = tl.where(b_bits < 0x3C800000, b_small, tl.minimum(b_normal, 0x7E))
    return (b_code | b_sign).to(tl.uint8)
