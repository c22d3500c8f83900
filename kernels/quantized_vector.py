"""Products of one row with quantized weights by vector arithmetic: every code is read once.

A program computes BN columns of the output, 16 bytes of codes a thread and row (a span) at a time;
the first are loaded before anything that depends on the kernel before: with PDL they overlap that
kernel's end. A card that reads 4 bits at 4 TB/s has some 4 instructions for each, so a code is put
where a float32's fraction is and taken as it is:

    4 bits   1 + code / 128  or, at the next place,  1 + code / 2048  times  16 x
    8 bits   1 + (code + 128) / 256
    float8   converted by the card; older ones move sign, exponent and fraction to their places:
             code * 2^-120, and x * 2^60

Where x has 2 bytes, 4 bits are taken two at a time (PAIRS), in 17 instructions a word instead of
20: 1024 + c or 1024 + 16 c in float16, less what makes it c - 8, times x in float16. The eight of x
for a word are multiplied by the power of two that brings the largest of them to 1, and four
products are summed in float16 before float32 has the sums: what that rounds is an eighth of what
rounding x to bfloat16 does.

What is too much of it is a sum of x alone, which the rows of a program share, and is taken off the
sum of a span. That is multiplied by its scale; all of it is float32. A thread holds the same spans
of x and of each row, so that nothing but the last sum is exchanged.
"""

import functools

import torch
import triton
import triton.language as tl
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.linear_epilogue import finish
from zlm.kernels.linear_small import device_name
from zlm.kernels.quantized_codes import FLOAT, FLOAT4, FOUR, Codes
from zlm.kernels.quantized_product import QuantizedProduct
from zlm.kernels.quantized_tile import uses_asm

LARGE = tl.constexpr(2.0**60)
E4M3 = tl.constexpr(
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
# A word's eight codes ($1) times four pairs of x in float16 ($2 to $5); $6: MAGIC, twice 1024.0.
WORD = tl.constexpr(
    "{ .reg .b32 s, a, b, c, d, less, part, away; .reg .b16 l, h; .reg .f32 low, high;"
    " mov.b32 less, 0xe408e408; mov.b32 part, 0x2c002c00; mov.b32 away, 0xd480d480;"
    " shr.u32 s, $1, 8;"
    " lop3.b32 a, $1, 0x000f000f, $6, 0xea; lop3.b32 b, $1, 0x00f000f0, $6, 0xea;"
    " lop3.b32 c, s, 0x000f000f, $6, 0xea; lop3.b32 d, s, 0x00f000f0, $6, 0xea;"
    " add.rn.f16x2 a, a, less; fma.rn.f16x2 b, b, part, away;"
    " add.rn.f16x2 c, c, less; fma.rn.f16x2 d, d, part, away;"
    " mul.rn.f16x2 a, a, $2; fma.rn.f16x2 a, b, $3, a;"
    " fma.rn.f16x2 a, c, $4, a; fma.rn.f16x2 a, d, $5, a;"
    " mov.b32 {l, h}, a; cvt.f32.f16 low, l; cvt.f32.f16 high, h; add.f32 $0, low, high; }"
)
PAIR = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
CONVERSION = (8, 9)  # compute capability from which cards convert float8
ONE = 0x3F800000  # the bits of 1.0, which the compiler must not see: it would use them twice
MAGIC = 0x64006400  # of two float16 1024.0: likewise
PROGRAMS = 2 * 132  # at least so many, that all SMs have loads in flight
ROWS = {4: 8, 8: 16}  # of a weight that a thread has a span of, by bits
# Spans that are all loaded at once; of more a program takes CHUNK after CHUNK. On an H200 a product
# with 4096 x 14336 at one program a multiprocessor, of all 448 spans, reached 1.6 TB/s.
MOST_SPANS, CHUNK = 256, 128
# (rows of weight, K) in 4 bits, x of 2 bytes: (BN, spans of a chunk, warps), by bench/quantized.py.
TUNED: dict[str, dict[tuple[int, int], tuple[int, int, int]]] = {
    "NVIDIA H200": {
        (6144, 4096): (8, 64, 2),
        (4096, 4096): (16, 128, 4),
        (28672, 4096): (4, 128, 2),
        (4096, 14336): (8, 128, 4),
    }
}


@triton.jit
def _pair(p_x, b_at, b_in, SIZE: tl.constexpr):
    """Return elements 2 ``b_at`` of x and those after them, float32."""
    if SIZE == 4:
        b_low = tl.load(p_x + 2 * b_at, mask=b_in, other=0.0).to(tl.float32)
        b_high = tl.load(p_x + 2 * b_at + 1, mask=b_in, other=0.0).to(tl.float32)
    else:
        b_pair = tl.load(p_x.to(tl.pointer_type(tl.int32)) + b_at, mask=b_in, other=0)
        b_low, b_high = _halves(b_pair, p_x.dtype.element_ty)
    return b_low, b_high


@triton.jit
def _halves(b_pair, TYPE: tl.constexpr):
    """Return the two elements of TYPE, 2 bytes each, of int32 pairs, as float32."""
    if tl.bfloat16 == TYPE:
        b_low = (b_pair << 16).to(tl.float32, bitcast=True)
        b_high = (b_pair & -65536).to(tl.float32, bitcast=True)
    else:
        b_low = b_pair.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        b_high = (b_pair >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return b_low, b_high


@triton.jit
def _byte(b_w, PLACE: tl.constexpr, ONE, KIND: tl.constexpr):
    """Return 1 + byte / 256 of the byte PLACE, or code * 2^-120 of a float8."""
    if KIND == 2:
        b_value = ((b_w << (24 - 8 * PLACE)) >> 4) & -2014314496  # 0x87F00000
    elif PLACE < 2:
        b_value = ((b_w << (15 - 8 * PLACE)) & 0x7F8000) | ONE
    else:
        b_value = ((b_w >> (8 * PLACE - 15)) & 0x7F8000) | ONE
    return b_value.to(tl.float32, bitcast=True)


@triton.jit
def _floats(b_w):
    """Return the four float8 of words in float32, by the card's own conversion."""
    b_low, b_high = tl.inline_asm_elementwise(
        E4M3, "=r,=r,r", [b_w], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    b_0, b_1 = _halves(b_low, tl.float16)
    b_2, b_3 = _halves(b_high, tl.float16)
    return b_0, b_1, b_2, b_3


@triton.jit
def _high(b_w, ONE):
    """Return 1 + code / 128 for the code at bit 16."""
    return ((b_w & 0xF0000) | ONE).to(tl.float32, bitcast=True)


@triton.jit
def _low(b_w, ONE):
    """Return 1 + code / 2048 for the code at bit 12."""
    return ((b_w & 0xF000) | ONE).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(
    b_sum, b_more, b_x_sum, b_scale, b_beside, BESIDE: tl.constexpr, KIND: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the product with weights, of that with codes as they were taken and what is too much
    of it, and of x's sum."""
    if KIND == 2:
        b_out = b_sum
    elif PAIRS:
        b_out = b_sum - b_more
    elif KIND == 1:
        b_out = b_sum * 256.0 - b_more
    else:
        b_out = b_sum * 128.0 - b_more
    if BESIDE == 1:
        b_out -= b_beside.to(tl.float32) * b_x_sum
    b_out *= b_scale.to(tl.float32)
    if BESIDE == 2:
        b_out += b_beside.to(tl.float32) * b_x_sum
    return b_out


@triton.jit
def _weight(
    p_w, p_scales, p_beside, first, b_n, b_in_n, w_stride, scale_stride,
    S: tl.constexpr, CODES: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Return S spans from *first* on: codes [4 S, BN], scales and what is beside them, [S, BN] or,
    a row each, [BN]."""
    b_row = b_n.to(tl.int64)
    b_i = first * 4 + tl.arange(0, 4 * S)[:, None]
    b_w = tl.load(
        p_w + (b_row * w_stride)[None, :] + b_i, other=0, eviction_policy="evict_first",
        mask=b_in_n[None, :] & (b_i < K // CODES * 4),
    )  # fmt: skip
    if C == K:
        b_at, b_there = b_row * scale_stride, b_in_n
    else:
        b_s = first + tl.arange(0, S)[:, None]
        b_at = (b_row * scale_stride)[None, :] + b_s * CODES // C
        b_there = b_in_n[None, :] & (b_s < K // CODES)
    b_scale = tl.load(p_scales + b_at, mask=b_there, other=0.0)
    b_beside = b_scale
    if BESIDE:
        b_beside = tl.load(p_beside + b_at, mask=b_there, other=0)
    return b_w, b_scale, b_beside


@triton.jit
def _spans(b_words):
    """Return the sums of every four rows of [4 S, BN]."""
    b_spans = tl.reshape(b_words, [b_words.shape[0] // 4, 4, b_words.shape[1]])
    return tl.sum(b_spans, 1)


@triton.jit
def _sum4(b_w, x0, x1, x2, x3, x4, x5, x6, x7, ONE):
    """Return [S, BN] sums; x_i belongs to the code at bit 4 i, odd ones are times 16."""
    acc = _low(b_w, ONE) * x3
    acc += _high(b_w, ONE) * x4
    acc += _low(b_w << 8, ONE) * x1
    acc += _high(b_w << 8, ONE) * x2
    acc += _low(b_w >> 8, ONE) * x5
    acc += _high(b_w >> 8, ONE) * x6
    acc += _high(b_w << 16, ONE) * x0
    acc += _low(b_w >> 16, ONE) * x7
    return _spans(acc)


@triton.jit
def _half_pair(b_low, b_high, b_factor):
    """Return both times *b_factor* in float16, as an int32."""
    return tl.inline_asm_elementwise(
        PAIR, "=r,r,r", [b_low * b_factor, b_high * b_factor], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _power(x0, x1, x2, x3, x4, x5, x6, x7):
    """Return the power of two that is just not above the largest, and the one over it."""
    b_most = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    b_other = tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7)))
    b_bits = tl.maximum(b_most, b_other).to(tl.int32, bitcast=True) & 0x7F800000
    return b_bits.to(tl.float32, bitcast=True), (0x7F000000 - b_bits).to(tl.float32, bitcast=True)


@triton.jit
def _sum_pairs(b_w, b_power, h0, h1, h2, h3, MAGIC):
    """Return [S, BN] sums of codes less 8 times x; h_i belongs to bits 4 i and 4 i + 16."""
    b_sum = tl.inline_asm_elementwise(
        WORD, "=f,r,r,r,r,r,r", [b_w, h0, h1, h2, h3, MAGIC], dtype=tl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip
    return _spans(b_sum * b_power)


@triton.jit
def _sum8(b_w, x0, x1, x2, x3, ONE, KIND: tl.constexpr, CONVERTS: tl.constexpr):
    """Return [S, BN] sums; x_i belongs to byte i."""
    if KIND == 1:
        b_w = b_w ^ -2139062144  # 0x80808080: 128 more
    if CONVERTS:
        b_0, b_1, b_2, b_3 = _floats(b_w)
        acc = b_0 * x0
        acc += b_1 * x1
        acc += b_2 * x2
        acc += b_3 * x3
    else:
        acc = _byte(b_w, 0, ONE, KIND) * x0
        acc += _byte(b_w, 1, ONE, KIND) * x1
        acc += _byte(b_w, 2, ONE, KIND) * x2
        acc += _byte(b_w, 3, ONE, KIND) * x3
    b_sum = _spans(acc)
    if KIND == 2 and not CONVERTS:
        b_sum = b_sum * LARGE
    return b_sum


@triton.jit
def _part(
    p_x, first, b_w, b_scale, b_beside, b_up, b_up_scale, b_up_beside, ONE,
    K: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    BESIDE: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr, GATE: tl.constexpr,
    CONVERTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the sums [S, BN] of S spans from *first* on, of both weights of a gate, and what is
    too much and x's sum [S, 1]. The sums are scaled unless scales are a row's."""
    CODES: tl.constexpr = 32 if KIND == 0 else 16
    b_i = tl.arange(0, 4 * S)[:, None]
    b_in_x = first * 4 + b_i < K // CODES * 4
    b_at = first * (CODES // 2) + b_i // 4 * (CODES // 2) + b_i % 4
    if KIND == 0:
        x0, x4 = _pair(p_x, b_at, b_in_x, SIZE)
        x1, x5 = _pair(p_x, b_at + 4, b_in_x, SIZE)
        x2, x6 = _pair(p_x, b_at + 8, b_in_x, SIZE)
        x3, x7 = _pair(p_x, b_at + 12, b_in_x, SIZE)
        b_even = (x0 + x2) + (x4 + x6)
        b_odd = (x1 + x3) + (x5 + x7)
        b_x_sum = _spans(b_even + b_odd)
        if PAIRS:
            b_more = b_x_sum * (ZERO - 8.0) if ZERO != 8 else tl.zeros_like(b_x_sum)
            b_power, b_over = _power(x0, x1, x2, x3, x4, x5, x6, x7)
            h0, h1 = _half_pair(x0, x4, b_over), _half_pair(x1, x5, b_over)
            h2, h3 = _half_pair(x2, x6, b_over), _half_pair(x3, x7, b_over)
            b_sum = _sum_pairs(b_w, b_power, h0, h1, h2, h3, ONE)
            b_up_sum = b_sum
            if GATE:
                b_up_sum = _sum_pairs(b_up, b_power, h0, h1, h2, h3, ONE)
        else:
            x1, x3, x5, x7 = x1 * 16.0, x3 * 16.0, x5 * 16.0, x7 * 16.0
            b_more = _spans((128.0 + ZERO) * b_even + (2048.0 + ZERO) * b_odd)
            b_sum = _sum4(b_w, x0, x1, x2, x3, x4, x5, x6, x7, ONE)
            b_up_sum = b_sum
            if GATE:
                b_up_sum = _sum4(b_up, x0, x1, x2, x3, x4, x5, x6, x7, ONE)
    else:
        x0, x2 = _pair(p_x, b_at, b_in_x, SIZE)
        x1, x3 = _pair(p_x, b_at + 4, b_in_x, SIZE)
        b_x_sum = _spans((x0 + x1) + (x2 + x3))
        b_more = b_x_sum * (256.0 + 128.0 + ZERO)
        if KIND == 2 and not CONVERTS:
            x0, x1, x2, x3 = x0 * LARGE, x1 * LARGE, x2 * LARGE, x3 * LARGE
        b_sum = _sum8(b_w, x0, x1, x2, x3, ONE, KIND, CONVERTS)
        b_up_sum = b_sum
        if GATE:
            b_up_sum = _sum8(b_up, x0, x1, x2, x3, ONE, KIND, CONVERTS)
    if not ROW:
        b_sum = _scaled(b_sum, b_more, b_x_sum, b_scale, b_beside, BESIDE, KIND, PAIRS)
        if GATE:
            b_up_sum = _scaled(
                b_up_sum, b_more, b_x_sum, b_up_scale, b_up_beside, BESIDE, KIND, PAIRS
            )
    return b_sum, b_up_sum, b_more, b_x_sum


@direct
@triton.jit(do_not_specialize=["ONE"])
def _vector_kernel(
    p_x, p_w, p_scales, p_beside, p_bias, p_residual, p_out, x_stride, w_stride, scale_stride,
    residual_stride, out_stride, N, ONE,
    K: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    BESIDE: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, SIZE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, CONVERTS: tl.constexpr,
    PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N: columns of the output. GATE: rows N to 2 N of the weight are what is gated. CONVERTS:
    whether the card converts float8. PAIRS: see the module; ONE is MAGIC then."""
    CODES: tl.constexpr = 32 if KIND == 0 else 16
    ROW: tl.constexpr = C == K
    b_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_in_n = b_n < N
    b_w, b_scale, b_beside = _weight(
        p_w, p_scales, p_beside, 0, b_n, b_in_n, w_stride, scale_stride, S, CODES, C, K, BESIDE
    )
    b_up, b_up_scale, b_up_beside = b_w, b_scale, b_beside
    b_bias = b_n
    b_up_bias = b_n
    if BIAS:
        b_bias = tl.load(p_bias + b_n, mask=b_in_n, other=0.0)
    if GATE:
        b_up, b_up_scale, b_up_beside = _weight(
            p_w, p_scales, p_beside, 0, b_n + N, b_in_n, w_stride, scale_stride, S, CODES, C, K,
            BESIDE,
        )  # fmt: skip
        if BIAS:
            b_up_bias = tl.load(p_bias + N + b_n, mask=b_in_n, other=0.0)
    begin(PDL)
    i_m = tl.program_id(1)
    p_x += i_m * x_stride
    b_residual = b_n
    if RESIDUAL:
        b_residual = tl.load(p_residual + i_m * residual_stride + b_n, mask=b_in_n, other=0.0)
    b_sum, b_up_sum, b_more, b_x_sum = _part(
        p_x, 0, b_w, b_scale, b_beside, b_up, b_up_scale, b_up_beside, ONE, K, S, KIND, ZERO,
        BESIDE, SIZE, ROW, GATE, CONVERTS, PAIRS,
    )  # fmt: skip
    for i in range(1, tl.cdiv(K // CODES, S)):
        b_next, b_next_scale, b_next_beside = _weight(
            p_w, p_scales, p_beside, i * S, b_n, b_in_n, w_stride, scale_stride, S, CODES, C, K,
            BESIDE,
        )  # fmt: skip
        b_next_up, b_next_up_scale, b_next_up_beside = b_next, b_next_scale, b_next_beside
        if GATE:
            b_next_up, b_next_up_scale, b_next_up_beside = _weight(
                p_w, p_scales, p_beside, i * S, b_n + N, b_in_n, w_stride, scale_stride, S, CODES,
                C, K, BESIDE,
            )  # fmt: skip
        b_part, b_up_part, b_part_more, b_x_part = _part(
            p_x, i * S, b_next, b_next_scale, b_next_beside, b_next_up, b_next_up_scale,
            b_next_up_beside, ONE, K, S, KIND, ZERO, BESIDE, SIZE, ROW, GATE, CONVERTS, PAIRS,
        )  # fmt: skip
        b_sum, b_up_sum = b_sum + b_part, b_up_sum + b_up_part
        b_more, b_x_sum = b_more + b_part_more, b_x_sum + b_x_part
    acc = tl.sum(b_sum, 0)
    acc_up = acc
    if GATE:
        acc_up = tl.sum(b_up_sum, 0)
    if ROW:
        more, x_sum = tl.sum(b_more, 0), tl.sum(b_x_sum, 0)
        acc = _scaled(acc, more, x_sum, b_scale, b_beside, BESIDE, KIND, PAIRS)
        if GATE:
            acc_up = _scaled(acc_up, more, x_sum, b_up_scale, b_up_beside, BESIDE, KIND, PAIRS)
    acc = finish(acc, acc_up, b_bias, b_up_bias, b_residual, BIAS, RESIDUAL, GATE, BIAS)
    tl.store(p_out + i_m * out_stride + b_n, acc, mask=b_in_n)


def takes(weight: Codes) -> bool:
    """Tell whether *weight* can be read so: its groups are whole spans."""
    K = weight.shape[1]
    size = 32 if weight.kind == FOUR else 16
    if weight.kind == FLOAT4:
        return False
    return K % size == 0 and weight.group % min(size, K) == 0


@functools.cache
def converts(device: torch.device) -> bool:
    """Tell whether the card converts float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CONVERSION


def setting(N: int, weight: Codes, *, gated: bool, pairs: bool) -> tuple[int, int, int]:
    """Return BN, spans of a chunk of K and warps for N columns of output."""
    tuned = TUNED.get(device_name(weight.data.device), {}).get(weight.shape)
    if tuned is not None and pairs:
        return tuned
    spans = power_of_two(weight.shape[1] // (32 if weight.kind == FOUR else 16))
    spans = CHUNK if spans > MOST_SPANS else max(32, spans)
    columns = ROWS[4 if weight.kind == FOUR else 8] // (2 if gated else 1)
    while columns > 1 and cdiv(N, columns) < PROGRAMS:
        columns //= 2
    return columns, spans, spans // 32


def run(product: QuantizedProduct, *, pdl: bool) -> None:
    """Launch for any number of rows, each on its own."""
    weight, N = product.weight, product.out.shape[1]
    pairs = weight.kind == FOUR and uses_asm(product.x)
    columns, spans, warps = setting(N, weight, gated=product.activation != 0, pairs=pairs)
    kind, beside = weight.beside
    words = weight.words
    _vector_kernel[(cdiv(N, columns), product.x.shape[0])](
        product.x, words, weight.scales, beside, product.bias, product.residual, product.out,
        product.x.stride(0), words.stride(0), weight.scales.stride(0), product.residual_stride,
        product.out.stride(0), N, MAGIC if pairs else ONE,
        C=weight.group, KIND=weight.kind, ZERO=weight.zero, BESIDE=kind, BN=columns, S=spans,
        K=weight.shape[1], SIZE=product.x.element_size(),
        CONVERTS=weight.kind == FLOAT and converts(product.x.device), PAIRS=pairs, PDL=pdl,
        **product.flags,
        num_warps=warps, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
