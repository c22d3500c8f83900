"""Codes of several rows as the numbers they stand for, where the matrix units take them.

Elements are int16 with two or four codes (``quantized_codes``); it is the lowest code of each that
becomes a number, and ``after`` shifts the next one down. One register holds two elements, and both
are computed at once:

    4 bits    (c & 15) | 128.0 is 128 + c in bfloat16 (1024 + c in float16); less 128 and the zero
    8 bits    in float16 likewise; in bfloat16, which has 8 bits of fraction, in two halves
    floats    sign, exponent and fraction to their places, times what the exponents' biases differ

What comes into the lower half of a register from the upper is masked away. The interpreter, and
products in float32, do the same element by element.
"""

import triton
import triton.language as tl

NEXT4 = tl.constexpr("shr.u32 $0, $1, 4;")
NEXT8 = tl.constexpr("shr.u32 $0, $1, 8;")
INT4_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 t, one; lop3.b32 t, $1, 0x000f000f, 0x43004300, 0xea; mov.b32 one, 0x3f803f80;"
    " fma.rn.bf16x2 $0, t, one, $2; }"
)
INT4_FLOAT16 = tl.constexpr(
    "{ .reg .b32 t, one; lop3.b32 t, $1, 0x000f000f, 0x64006400, 0xea; mov.b32 one, 0x3c003c00;"
    " fma.rn.f16x2 $0, t, one, $2; }"
)
# The upper four bits, with the sign's turned over, are 8 too much.
INT8_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 l, h, one, more, many; mov.b32 one, 0x3f803f80; mov.b32 more, 0xc308c308;"
    " mov.b32 many, 0x41804180; lop3.b32 l, $1, 0x000f000f, 0x43004300, 0xea; shr.u32 h, $1, 4;"
    " lop3.b32 h, h, 0x000f000f, 0x43084308, 0x6a; fma.rn.bf16x2 h, h, one, more;"
    " fma.rn.bf16x2 l, l, one, $2; fma.rn.bf16x2 $0, h, many, l; }"
)
INT8_FLOAT16 = tl.constexpr(
    "{ .reg .b32 t, one; lop3.b32 t, $1, 0x00ff00ff, 0x64806480, 0x6a; mov.b32 one, 0x3c003c00;"
    " fma.rn.f16x2 $0, t, one, $2; }"
)
E4M3_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 t, s, one, zero; mov.b32 one, 0x7b807b80; mov.b32 zero, 0x80008000;"
    " shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 t, $1, 4;"
    " lop3.b32 t, t, 0x07f007f0, s, 0xea; fma.rn.bf16x2 $0, t, one, zero; }"
)
E4M3_FLOAT16 = tl.constexpr(
    "{ .reg .b32 t, s, one, zero; mov.b32 one, 0x5c005c00; mov.b32 zero, 0x80008000;"
    " shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 t, $1, 7;"
    " lop3.b32 t, t, 0x3f803f80, s, 0xea; fma.rn.f16x2 $0, t, one, zero; }"
)
E2M1_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 t, s, one, zero; mov.b32 one, 0x7e807e80; mov.b32 zero, 0x80008000;"
    " shl.b32 s, $1, 12; and.b32 s, s, 0x80008000; shl.b32 t, $1, 6;"
    " lop3.b32 t, t, 0x01c001c0, s, 0xea; fma.rn.bf16x2 $0, t, one, zero; }"
)
E2M1_FLOAT16 = tl.constexpr(
    "{ .reg .b32 t, s, one, zero; mov.b32 one, 0x74007400; mov.b32 zero, 0x80008000;"
    " shl.b32 s, $1, 12; and.b32 s, s, 0x80008000; shl.b32 t, $1, 9;"
    " lop3.b32 t, t, 0x0e000e00, s, 0xea; fma.rn.f16x2 $0, t, one, zero; }"
)


@triton.jit
def after(b_codes, KIND: tl.constexpr, ASM: tl.constexpr):
    """Return int16 elements with the second code of each as the lowest."""
    if not ASM:
        if KIND % 3 == 0:
            b_next = b_codes >> 4
        else:
            b_next = b_codes >> 8
    elif KIND % 3 == 0:
        b_next = tl.inline_asm_elementwise(
            NEXT4, "=r,r", [b_codes], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        b_next = tl.inline_asm_elementwise(
            NEXT8, "=r,r", [b_codes], dtype=tl.int16, is_pure=True, pack=2
        )
    return b_next


@triton.jit
def numbers(b_codes, b_zero, TYPE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Return the lowest codes of int16 [BN, BK] in TYPE; whole ones less zeros [BN, 1 or BK]."""
    if not ASM:
        b_value = _plain(b_codes, b_zero, KIND).to(TYPE)
    elif KIND == 0:
        b_value = _less4(b_codes, b_zero, TYPE)
    elif KIND == 1:
        b_value = _less8(b_codes, b_zero, TYPE)
    elif KIND == 2:
        b_value = _float8(b_codes, TYPE)
    else:
        b_value = _float4(b_codes, TYPE)
    return b_value


@triton.jit
def _plain(b_codes, b_zero, KIND: tl.constexpr):
    """Return the numbers in float32, by plain arithmetic."""
    b_code = b_codes.to(tl.int32)
    if KIND == 0:
        b_value = (b_code & 15).to(tl.float32) - b_zero
    elif KIND == 1:
        b_value = ((b_code & 255) ^ 128).to(tl.float32) - 128.0 - b_zero
    elif KIND == 2:
        b_bits = ((b_code & 127) << 20) | ((b_code & 128) << 24)
        b_value = b_bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        b_bits = ((b_code & 7) << 22) | ((b_code & 8) << 28)
        b_value = b_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return b_value


@triton.jit
def _less4(b_codes, b_zero, TYPE: tl.constexpr):
    if tl.bfloat16 == TYPE:
        b_minus = tl.broadcast_to((-128.0 - b_zero).to(TYPE), b_codes.shape)
        b_value = tl.inline_asm_elementwise(
            INT4_BFLOAT16, "=r,r,r", [b_codes, b_minus], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_minus = tl.broadcast_to((-1024.0 - b_zero).to(TYPE), b_codes.shape)
        b_value = tl.inline_asm_elementwise(
            INT4_FLOAT16, "=r,r,r", [b_codes, b_minus], dtype=tl.float16, is_pure=True, pack=2
        )
    return b_value


@triton.jit
def _less8(b_codes, b_zero, TYPE: tl.constexpr):
    if tl.bfloat16 == TYPE:
        b_minus = tl.broadcast_to((-128.0 - b_zero).to(TYPE), b_codes.shape)
        b_value = tl.inline_asm_elementwise(
            INT8_BFLOAT16, "=r,r,r", [b_codes, b_minus], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_minus = tl.broadcast_to((-1152.0 - b_zero).to(TYPE), b_codes.shape)
        b_value = tl.inline_asm_elementwise(
            INT8_FLOAT16, "=r,r,r", [b_codes, b_minus], dtype=tl.float16, is_pure=True, pack=2
        )
    return b_value


@triton.jit
def _float8(b_codes, TYPE: tl.constexpr):
    if tl.bfloat16 == TYPE:
        b_value = tl.inline_asm_elementwise(
            E4M3_BFLOAT16, "=r,r", [b_codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_value = tl.inline_asm_elementwise(
            E4M3_FLOAT16, "=r,r", [b_codes], dtype=tl.float16, is_pure=True, pack=2
        )
    return b_value


@triton.jit
def _float4(b_codes, TYPE: tl.constexpr):
    if tl.bfloat16 == TYPE:
        b_value = tl.inline_asm_elementwise(
            E2M1_BFLOAT16, "=r,r", [b_codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_value = tl.inline_asm_elementwise(
            E2M1_FLOAT16, "=r,r", [b_codes], dtype=tl.float16, is_pure=True, pack=2
        )
    return b_value
