"""Products of several rows with quantized weights by the matrix units, codes unpacked in registers.

    weight [BN, BK]  times  x [BK, BM]  ->  [BN, BM]      the weight's rows are the units' rows

A loop over K by chunks of a group, several stages ahead. The matrix units take codes as they are,
less their zeros, which x's type holds exactly; a chunk's sums are multiplied by its scales in
float32. Where groups are too short for that, or have offsets, it is the weights that are computed,
rounded to x's type (SPREAD). With few columns and much K the latter is split among programs, whose
sums (float32) a second launch adds up in order and finishes: no atomics.

A chunk is four products of 4-bit codes, two of bytes: of the columns whose codes stand at one bit,
``8 j + e`` of every span, x's being loaded 16 bytes at a time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.linear_epilogue import finish
from zlm.kernels.linear_tile import call_columns
from zlm.kernels.quantized_codes import OFFSETS, Codes
from zlm.kernels.quantized_numbers import after, numbers
from zlm.kernels.quantized_product import QuantizedProduct


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program works."""

    columns: int  # BN
    warps: int
    stages: int


# By BM. With 8 columns it is Ampere's instructions that multiply, warp by warp, as soon as what
# they take is unpacked.
TILES = {8: Tile(64, 2, 4), 16: Tile(64, 4, 4), 32: Tile(64, 4, 4), 64: Tile(64, 4, 3)}
# At least so many, if K can be split for it: a program's units wait for its codes to be unpacked,
# and the other way round, so that several have to share a multiprocessor.
PROGRAMS = 4 * 132
MOST_SPLITS = 16
LEAST_CHUNKS = 4  # of a split
AHEAD = 64  # int16 elements of a program's rows that are called into L2 ahead: a line of each
# On an H200, 64 rows of Llama-3.1-8B's products in 4 bits took 252 us a layer so, 311 spread out.
MOST_ROWS = 64
FIXED_ROWS = 64  # BM where a row's bits may not depend on the number of rows
FINISH_BLOCK = 1024


@triton.jit
def _scales(p_scales, b_at, b_in):
    """Return scales at ``b_at``, float32."""
    return tl.load(p_scales + b_at, mask=b_in, other=0.0).to(tl.float32)


@triton.jit
def _beside(p_beside, b_at, b_in, ZERO: tl.constexpr, BESIDE: tl.constexpr):
    """Return zeros or offsets at ``b_at``, float32.

    What a loop hands on to its next turn would keep the codes from being unpacked where the matrix
    units take them: so these are loaded where they are used.
    """
    if BESIDE:
        b_beside = tl.load(p_beside + b_at, mask=b_in, other=0).to(tl.float32)
    else:
        b_beside = tl.zeros_like(b_at).to(tl.float32) + ZERO
    return b_beside


@triton.jit
def _weights(
    b_codes, b_scale, b_beside, TYPE: tl.constexpr, KIND: tl.constexpr, BESIDE: tl.constexpr,
    SPREAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the lowest codes of int16 elements less their zeros in TYPE, or weights (SPREAD)."""
    b_value = numbers(b_codes, b_beside * 0.0 if SPREAD else b_beside, TYPE, KIND, ASM)
    if SPREAD:
        b_wide = b_value.to(tl.float32)
        if BESIDE == 2:
            b_wide = b_wide * b_scale + b_beside
        else:
            b_wide = (b_wide - b_beside) * b_scale
        b_value = b_wide.to(TYPE)
    return b_value


@triton.jit
def _product(
    acc, b_codes, b_scale, b_beside, b_x0, b_x1, b_x2, b_x3, KIND: tl.constexpr,
    BESIDE: tl.constexpr, SPREAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return *acc* plus the product [BN, BM] of a chunk."""
    TYPE: tl.constexpr = b_x0.dtype
    b_w = _weights(b_codes, b_scale, b_beside, TYPE, KIND, BESIDE, SPREAD, ASM)
    acc = tl.dot(b_w, b_x0, acc, input_precision="ieee")
    b_codes = after(b_codes, KIND, ASM)
    b_w = _weights(b_codes, b_scale, b_beside, TYPE, KIND, BESIDE, SPREAD, ASM)
    acc = tl.dot(b_w, b_x1, acc, input_precision="ieee")
    if KIND % 3 == 0:
        b_codes = after(b_codes, KIND, ASM)
        b_w = _weights(b_codes, b_scale, b_beside, TYPE, KIND, BESIDE, SPREAD, ASM)
        acc = tl.dot(b_w, b_x2, acc, input_precision="ieee")
        b_codes = after(b_codes, KIND, ASM)
        b_w = _weights(b_codes, b_scale, b_beside, TYPE, KIND, BESIDE, SPREAD, ASM)
        acc = tl.dot(b_w, b_x3, acc, input_precision="ieee")
    return acc


@triton.jit
def _added(
    acc, b_codes, b_scale, b_beside, b_x0, b_x1, b_x2, b_x3, KIND: tl.constexpr,
    BESIDE: tl.constexpr, MODE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return *acc* plus a chunk's product, times its scales where they are a group's."""
    if MODE == 1:
        b_part = _product(
            tl.zeros_like(acc), b_codes, b_scale, b_beside, b_x0, b_x1, b_x2, b_x3, KIND, BESIDE,
            False, ASM,
        )  # fmt: skip
        acc += b_part * b_scale
    else:
        acc = _product(
            acc, b_codes, b_scale, b_beside, b_x0, b_x1, b_x2, b_x3, KIND, BESIDE, MODE == 2, ASM
        )
    return acc


@triton.jit
def sums(
    p_x, b_in_m, p_w, p_scales, p_beside, b_row, b_in_n, more, w_stride, scale_stride, first, last,
    K: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    BESIDE: tl.constexpr, MODE: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Return the products [BN, BM] of rows ``b_row`` of a weight, and of those ``more`` rows on.

    p_x: pointers [1, BM] to rows of x. first, last: the chunks of K to take. GATE: whether there
    are two products. MODE: 0 a scale a row, 1 scales of chunks, 2 weights are computed.
    """
    PACKED: tl.constexpr = 4 if KIND % 3 == 0 else 2  # codes of an element of p_w
    WIDTH: tl.constexpr = BK // PACKED
    WHOLE: tl.constexpr = K % BK == 0
    b_e = tl.arange(0, WIDTH)
    p_rows = p_w + b_row[:, None] * w_stride + b_e[None, :]
    b_group = (b_row * scale_stride)[:, None]
    if MODE == 2:
        b_in_k = b_e // 8 * 8 * PACKED  # the first column of an element's span
        b_in_scale = b_in_n[:, None] & (b_in_k < BK)[None, :]
    else:
        b_in_scale = b_in_n[:, None]
    b_k = b_e // 8 * 8 * PACKED + b_e % 8
    if MODE != 2:  # those of the first chunk; the loop loads the next chunk's ahead of their use
        b_first = b_group + first * BK // C
        b_scale = _scales(p_scales, b_first, b_in_scale)
        b_up_scale = b_scale
        if GATE:
            b_up_scale = _scales(p_scales, b_first + more * scale_stride, b_in_scale)
    p_columns = p_x + b_k[:, None]
    acc = tl.zeros([b_row.shape[0], b_in_m.shape[0]], tl.float32)
    acc_up = tl.zeros([b_row.shape[0], b_in_m.shape[0]], tl.float32)
    for i in range(first, last):
        at = i * BK
        b_in_w, b_in_x = b_in_n[:, None], b_in_m[None, :]
        if not WHOLE:
            b_in_w = b_in_w & (at // PACKED + b_e < K // PACKED)[None, :]
            b_in_x = b_in_x & (at + b_k < K)[:, None]
        b_w = tl.load(p_rows + at // PACKED, mask=b_in_w, other=0.0)
        b_x0 = tl.load(p_columns + at, mask=b_in_x, other=0.0)
        b_x1 = tl.load(p_columns + at + 8, mask=b_in_x, other=0.0)
        b_x2 = b_x0
        b_x3 = b_x0
        if KIND % 3 == 0:
            b_x2 = tl.load(p_columns + at + 16, mask=b_in_x, other=0.0)
            b_x3 = tl.load(p_columns + at + 24, mask=b_in_x, other=0.0)
        b_there = b_in_scale
        if MODE == 2:
            b_at = b_group + ((at + b_in_k) // C)[None, :]
            b_there = b_in_scale & b_in_w
            b_scale = _scales(p_scales, b_at, b_there)
        else:
            b_at = b_group + at // C
        if MODE == 1:
            b_after, b_later = b_in_scale & (at + BK < K), b_group + (at + BK) // C
            b_next = _scales(p_scales, b_later, b_after)
        b_beside = _beside(p_beside, b_at, b_there, ZERO, BESIDE)
        acc = _added(acc, b_w, b_scale, b_beside, b_x0, b_x1, b_x2, b_x3, KIND, BESIDE, MODE, ASM)
        if MODE == 1:
            b_scale = b_next
        if GATE:
            b_at += more * scale_stride
            b_up = tl.load(p_rows + more * w_stride + at // PACKED, mask=b_in_w, other=0.0)
            if MODE == 2:
                b_up_scale = _scales(p_scales, b_at, b_there)
            elif MODE == 1:
                b_next = _scales(p_scales, b_later + more * scale_stride, b_after)
            b_beside = _beside(p_beside, b_at, b_there, ZERO, BESIDE)
            acc_up = _added(
                acc_up, b_up, b_up_scale, b_beside, b_x0, b_x1, b_x2, b_x3, KIND, BESIDE, MODE,
                ASM,
            )  # fmt: skip
            if MODE == 1:
                b_up_scale = b_next
    if MODE == 0:
        acc *= b_scale
        if GATE:
            acc_up *= b_up_scale
    return acc, acc_up


@direct
@triton.jit(do_not_specialize=["M", "chunks"])
def _tile_kernel(
    p_x, p_w, p_scales, p_beside, p_bias, p_residual, p_out, p_parts, x_stride, w_stride,
    scale_stride, residual_stride, out_stride, N, M, chunks,
    K: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    BESIDE: tl.constexpr, MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATE: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """chunks: of a split; those of a program are the second dimension's."""
    b_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_m = tl.program_id(2) * BM + tl.arange(0, BM)
    b_in_n, b_in_m = b_n < N, b_m < M
    first = tl.program_id(1) * chunks
    last = tl.minimum(first + chunks, tl.cdiv(K, BK))
    if PDL and AHEAD > 0:
        PACKED: tl.constexpr = 4 if KIND % 3 == 0 else 2
        p_first = p_w + first * (BK // PACKED)
        call_columns(p_first, b_n, w_stride, N, AHEAD, 2)
        if GATE:
            call_columns(p_first + N.to(tl.int64) * w_stride, b_n, w_stride, N, AHEAD, 2)
    begin(PDL)
    acc, acc_up = sums(
        p_x + b_m.to(tl.int64)[None, :] * x_stride, b_in_m, p_w, p_scales, p_beside,
        b_n.to(tl.int64), b_in_n, N.to(tl.int64), w_stride, scale_stride, first, last,
        K, C, KIND, ZERO, BESIDE, MODE, BK, GATE, ASM,
    )  # fmt: skip
    b_wide, b_in = b_m.to(tl.int64)[None, :], b_in_n[:, None] & b_in_m[None, :]
    if SPLIT:
        WEIGHTS: tl.constexpr = 2 if GATE else 1
        p_part = p_parts + (tl.program_id(1).to(tl.int64) * M + b_wide) * (N * WEIGHTS)
        tl.store(p_part + b_n[:, None], acc, mask=b_in)
        if GATE:
            tl.store(p_part + N + b_n[:, None], acc_up, mask=b_in)
    else:
        b_bias = b_wide
        b_up_bias = b_wide
        b_residual = b_wide
        if BIAS:
            b_bias = tl.load(p_bias + b_n, mask=b_in_n, other=0.0)[:, None]
            if GATE:
                b_up_bias = tl.load(p_bias + N + b_n, mask=b_in_n, other=0.0)[:, None]
        if RESIDUAL:
            p_tile = p_residual + b_wide * residual_stride + b_n[:, None]
            b_residual = tl.load(p_tile, mask=b_in, other=0.0)
        acc = finish(acc, acc_up, b_bias, b_up_bias, b_residual, BIAS, RESIDUAL, GATE, BIAS)
        tl.store(p_out + b_wide * out_stride + b_n[:, None], acc, mask=b_in)


@direct
@triton.jit(do_not_specialize=["M", "splits"])
def _finish_kernel(
    p_parts, p_bias, p_residual, p_out, residual_stride, out_stride, N, M, splits,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(1).to(tl.int64)
    b_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_n < N
    b_bias = b_n
    b_up_bias = b_n
    if BIAS:
        b_bias = tl.load(p_bias + b_n, mask=b_in, other=0.0)
        if GATE:
            b_up_bias = tl.load(p_bias + N + b_n, mask=b_in, other=0.0)
    begin(PDL)
    b_residual = b_n
    if RESIDUAL:
        b_residual = tl.load(p_residual + i_m * residual_stride + b_n, mask=b_in, other=0.0)
    WEIGHTS: tl.constexpr = 2 if GATE else 1
    acc = tl.zeros([BLOCK], tl.float32)
    acc_up = tl.zeros([BLOCK], tl.float32)
    for i in range(splits):
        p_part = p_parts + (i * M + i_m) * (N * WEIGHTS) + b_n
        acc += tl.load(p_part, mask=b_in, other=0.0)
        if GATE:
            acc_up += tl.load(p_part + N, mask=b_in, other=0.0)
    acc = finish(acc, acc_up, b_bias, b_up_bias, b_residual, BIAS, RESIDUAL, GATE, BIAS)
    tl.store(p_out + i_m * out_stride + b_n, acc, mask=b_in)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a product is cut."""

    rows: int  # BM, of ``TILES``
    chunk: int  # BK
    mode: int  # see ``sums``
    splits: int  # of K
    chunks: int  # of a split


def mode_and_chunk(weight: Codes) -> tuple[int, int]:
    """Return MODE (see ``sums``) and BK."""
    K, mode = weight.shape[1], 1
    if weight.group == K:
        mode = 0
    least = 64 if weight.is_packed else 32  # columns of a chunk: 16 of each product
    if weight.beside[0] == OFFSETS or (mode and weight.group % least):
        mode = 2
    within = weight.group if mode == 1 else K
    most = 2 * least if mode == 2 else 128  # weights that are computed take more registers
    sizes = [size for size in (128, 64, 32) if least <= size <= most]
    return mode, next((size for size in sizes if within % size == 0), sizes[-1])


def setting(rows: int, weight: Codes, *, gated: bool, fixed: bool) -> Setting:
    """Return how a product of *rows* rows is cut; with *fixed* they do not matter."""
    N, K = weight.shape
    mode, chunk = mode_and_chunk(weight)
    chunks = cdiv(K, chunk)
    splits = 1
    tall = FIXED_ROWS if fixed else max(min(TILES), power_of_two(rows))
    if not fixed:
        programs = cdiv(N // 2 if gated else N, TILES[tall].columns)
        most = min(MOST_SPLITS, chunks // LEAST_CHUNKS)
        splits = max(1, min(most, round(PROGRAMS / programs)))
    each = cdiv(chunks, splits)
    return Setting(tall, chunk, mode, cdiv(chunks, each), each)


def scratch_values(rows: int, weight: Codes, *, gated: bool, fixed: bool) -> int:
    """Return how many float32 numbers the partial sums of a product of *rows* rows are."""
    splits = setting(rows, weight, gated=gated, fixed=fixed).splits
    return splits * rows * weight.shape[0] if splits > 1 else 0


def uses_asm(x: Tensor) -> bool:
    """Tell whether two codes are unpacked at once: not in the interpreter, and not to float32."""
    return x.device.type == "cuda" and x.element_size() == 2


def run(product: QuantizedProduct, scratch: Tensor | None, *, fixed: bool, pdl: bool) -> None:
    """Launch, for up to 64 rows or, with *fixed*, any number."""
    weight, x, out = product.weight, product.x, product.out
    (rows, N), gated = out.shape, bool(product.activation)
    how = setting(rows, weight, gated=gated, fixed=fixed)
    assert fixed or rows <= MOST_ROWS
    split = how.splits > 1
    assert not split or (scratch is not None and scratch.dtype == torch.float32)
    codes = weight.halves
    kind, beside = weight.beside
    tile = TILES[how.rows]
    grid = cdiv(N, tile.columns), how.splits, cdiv(rows, how.rows)
    ahead = AHEAD if codes.shape[1] // how.splits >= AHEAD else 0
    _tile_kernel[grid](
        x, codes, weight.scales, beside, product.bias, product.residual, out, scratch,
        x.stride(0), codes.stride(0), weight.scales.stride(0), product.residual_stride,
        out.stride(0), N, rows, how.chunks,
        K=weight.shape[1], C=weight.group, KIND=weight.kind, ZERO=weight.zero, BESIDE=kind,
        MODE=how.mode, BM=how.rows, BN=tile.columns, BK=how.chunk, SPLIT=split,
        ASM=uses_asm(x), AHEAD=ahead, PDL=pdl, **product.flags,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    if split:
        add_up(
            scratch, how.splits, product.bias, product.residual, out, product.activation, pdl=pdl
        )


def add_up(
    parts: Tensor,
    splits: int,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: int,
    *,
    pdl: bool,
) -> None:
    """Write the sum of *parts*, float32 [splits, M, N] or, of a gate, [splits, M, 2 N], to *out*.

    What follows the sum is that of ``QuantizedProduct``.
    """
    rows, N = out.shape
    stride = 0 if residual is None else residual.stride(0)
    _finish_kernel[(cdiv(N, FINISH_BLOCK), rows)](
        parts, bias, residual, out, stride, out.stride(0), N, rows, splits,
        BLOCK=FINISH_BLOCK, BIAS=bias is not None, RESIDUAL=residual is not None,
        GATE=activation, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
