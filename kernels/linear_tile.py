"""Products of up to 64 rows by the matrix units: [BM, BK] tiles of x by [BN, BK] tiles of weight.

A loop over K with loads several stages ahead; all rows in one tile (BM 8, 16, 32 or 64), so a
weight is read once. No split of K: a small output leaves SMs idle, and still beats a second launch.
With PDL the first part of a program's weights is called into L2 before the kernel waits for the one
before it.

A norm multiplies x by its weight on the way to the product and the sums by the root at the end: one
pass over x. What is rounded to the weight's type then lacks the root, which is of no consequence
but for float16's range: there the roots are found in a first loop over x.
"""

import torch
import triton
import triton.language as tl
from zlm.kernels.chain import LINE_BYTES, begin, call_into_l2
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.linear_epilogue import Product, finish

SHARED_BYTES = 200 * 1024  # of the 227 kB that a program may use on Hopper
PREFETCH_BYTES = 16 * 1024  # of weights, a program: fewer than 16 MiB in all, of 50 in L2


@triton.jit
def call_columns(p_w, b_n, stride, N, COLUMNS: tl.constexpr, BYTES: tl.constexpr):
    """Prefetch the first COLUMNS (a power of two) elements of rows ``b_n`` of a weight."""
    LINES: tl.constexpr = COLUMNS * BYTES // LINE_BYTES
    b_rows = tl.minimum(b_n, N - 1).to(tl.int64)[:, None]
    b_at = b_rows * stride + tl.arange(0, LINES)[None, :] * (LINE_BYTES // BYTES)
    call_into_l2(p_w + b_at)


@triton.jit
def _multiply(b_x, b_w, acc, SWAPPED: tl.constexpr):
    """Return *acc* plus x [BM, BK] @ w [BK, BN], or with SWAPPED its transpose [BN, BM]."""
    if SWAPPED:
        acc = tl.dot(tl.trans(b_w), tl.trans(b_x), acc, input_precision="ieee")
    else:
        acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
    return acc


@direct
@triton.jit(do_not_specialize=["M"])
def _tile_kernel(
    p_x, p_w, p_bias, p_norm, p_residual, p_up, p_up_bias, p_out,
    x_stride, w_stride, residual_stride, up_stride, out_stride, N, eps, M,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    FIRST: tl.constexpr, AHEAD: tl.constexpr, BYTES: tl.constexpr, SWAPPED: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    UP_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FIRST: the roots of a norm are found in a loop of their own. AHEAD: columns to prefetch."""
    b_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_m = tl.program_id(1) * BM + tl.arange(0, BM)
    b_in_n, b_in_m = b_n < N, b_m < M
    TYPE: tl.constexpr = p_w.dtype.element_ty
    b_bias = b_n
    b_up_bias = b_n
    if BIAS:
        b_bias = tl.load(p_bias + b_n, mask=b_in_n, other=0.0)
    if UP_BIAS:
        b_up_bias = tl.load(p_up_bias + b_n, mask=b_in_n, other=0.0)
    if PDL and AHEAD > 0:
        call_columns(p_w, b_n, w_stride, N, AHEAD, BYTES)
        if GATE:
            call_columns(p_up, b_n, up_stride, N, AHEAD, BYTES)
    begin(PDL)
    b_k = tl.arange(0, BK)
    p_rows = p_x + b_m.to(tl.int64)[:, None] * x_stride
    p_columns = p_w + b_n.to(tl.int64)[None, :] * w_stride
    p_up_columns = p_columns
    if GATE:
        p_up_columns = p_up + b_n.to(tl.int64)[None, :] * up_stride
    b_wide, b_in = b_m.to(tl.int64)[:, None], b_in_m[:, None] & b_in_n[None, :]
    b_residual = b_n
    if RESIDUAL:
        p_tile = p_residual + b_wide * residual_stride + b_n[None, :]
        b_residual = tl.load(p_tile, mask=b_in, other=0.0)
    b_root = tl.zeros([BM], tl.float32)
    if NORM and FIRST:
        for start in range(0, K, BK):
            b_in_x = b_in_m[:, None] & (start + b_k < K)[None, :]
            b_x = tl.load(p_rows + start + b_k[None, :], mask=b_in_x, other=0.0).to(tl.float32)
            b_root += tl.sum(b_x * b_x, axis=1)
        b_root = 1.0 / tl.sqrt(b_root / K + eps)
    if SWAPPED:
        acc = tl.zeros([BN, BM], tl.float32)
        acc_up = tl.zeros([BN, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BN], tl.float32)
        acc_up = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        b_at = start + b_k
        if WHOLE:
            b_in_x = b_in_m[:, None]
            b_in_w = b_in_n[None, :]
        else:
            b_in_x = b_in_m[:, None] & (b_at < K)[None, :]
            b_in_w = b_in_n[None, :] & (b_at < K)[:, None]
        b_x = tl.load(p_rows + b_at[None, :], mask=b_in_x, other=0.0)
        if NORM:
            b_norm = tl.load(p_norm + b_at, mask=b_at < K, other=0.0).to(tl.float32)
            b_x = b_x.to(tl.float32)
            if FIRST:
                b_x = b_x * b_root[:, None] * b_norm[None, :]
            else:
                b_root += tl.sum(b_x * b_x, axis=1)
                b_x = b_x * b_norm[None, :]
        b_x = b_x.to(TYPE)
        b_w = tl.load(p_columns + b_at[:, None], mask=b_in_w, other=0.0)
        acc = _multiply(b_x, b_w, acc, SWAPPED)
        if GATE:
            b_up = tl.load(p_up_columns + b_at[:, None], mask=b_in_w, other=0.0)
            acc_up = _multiply(b_x, b_up, acc_up, SWAPPED)
    if SWAPPED:
        acc, acc_up = tl.trans(acc), tl.trans(acc_up)
    if NORM and not FIRST:
        b_root = 1.0 / tl.sqrt(b_root / K + eps)
        acc, acc_up = acc * b_root[:, None], acc_up * b_root[:, None]
    acc = finish(acc, acc_up, b_bias, b_up_bias, b_residual, BIAS, RESIDUAL, GATE, UP_BIAS)
    tl.store(p_out + b_wide * out_stride + b_n[None, :], acc, mask=b_in)


def run(
    product: Product, rows: int, columns: int, depth: int, stages: int, warps: int, *, pdl: bool
) -> None:
    """Launch with tiles BM, BN, BK = *rows*, *columns*, *depth*.

    Where *stages* tiles would not fit in shared memory, depth and then stages are lowered; float32
    weights get smaller tiles.
    """
    (M, K), N = product.x.shape, product.weight.shape[0]
    size = product.weight.element_size()
    if size == 4:  # no matrix unit multiplies float32 exactly: by vectors, and larger tiles spill
        columns, depth = 16, min(depth, 64)
    depth = max(16, min(depth, power_of_two(K)))
    per_k = rows * max(size, product.x.element_size())
    per_k += columns * size * (2 if product.up is not None else 1)
    while depth > 32 and per_k * depth * 2 > SHARED_BYTES:
        depth //= 2
    stages = max(1, min(stages, SHARED_BYTES // (per_k * depth)))
    ahead = PREFETCH_BYTES // (columns * size * (2 if product.up is not None else 1))
    ahead = min(ahead, power_of_two(K + 1) // 2)  # no more than there is
    ahead = ahead if ahead * size >= LINE_BYTES.value else 0
    options = {"BM": rows, "BN": columns, "BK": depth, "K": K, "PDL": pdl, **product.flags}
    options |= {"num_warps": warps, "num_stages": stages, "launch_pdl": pdl}
    grid = (cdiv(N, columns), cdiv(M, rows))
    _tile_kernel[grid](
        *product.tensors, *product.strides, N, product.eps, M,
        WHOLE=K % depth == 0, FIRST=product.weight.dtype == torch.float16,
        AHEAD=ahead, BYTES=size, SWAPPED=size == 2 and (rows < 16 or columns >= 64 > rows),
        **options,
    )  # fmt: skip
