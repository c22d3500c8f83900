"""Products of 1 to 4 rows by vector arithmetic: every weight is read once, nothing is multiplied
by the matrix units.

A program computes BN columns of the output. With K up to what registers hold it reads the whole
[BN, K] tile of the weight in one go ("one tile": the sweep on an H200 found no loop that beats it),
and the weight's loads are issued before anything that depends on the kernel before: with PDL they
overlap its end. All rows of x multiply the tile in registers. Beyond that K goes in chunks and the
second grid axis is the row of x; a norm then first runs over x alone.
"""

import triton
import triton.language as tl
from zlm.kernels.linear_epilogue import Product, finish


@triton.jit
def _row_of_x(p_x, p_norm, b_k, b_in_k, K, eps, NORM: tl.constexpr, TYPE: tl.constexpr):
    """Return one row of x, normalised if asked for, rounded to the weight's TYPE, in float32."""
    b_x = tl.load(p_x + b_k, mask=b_in_k, other=0.0).to(tl.float32)
    if NORM:
        root = 1.0 / tl.sqrt(tl.sum(b_x * b_x) / K + eps)
        b_x = b_x * root * tl.load(p_norm + b_k, mask=b_in_k, other=0.0).to(tl.float32)
    return b_x.to(TYPE).to(tl.float32)


@triton.jit
def _one_tile_kernel(
    p_x, p_w, p_bias, p_norm, p_residual, p_up, p_up_bias, p_out,
    x_stride, w_stride, residual_stride, up_stride, out_stride, N, eps,
    K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    UP_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_k = tl.arange(0, BK)
    b_in_n, b_in_k = b_n < N, b_k < K
    b_in_w = b_in_n[:, None] & b_in_k[None, :]
    b_wide = b_n.to(tl.int64)[:, None]
    TYPE: tl.constexpr = p_w.dtype.element_ty
    b_w = tl.load(
        p_w + b_wide * w_stride + b_k[None, :], mask=b_in_w, other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    b_up = b_w
    if GATE:
        b_up = tl.load(
            p_up + b_wide * up_stride + b_k[None, :], mask=b_in_w, other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for m in tl.static_range(M):
        b_x = _row_of_x(p_x + m * x_stride, p_norm, b_k, b_in_k, K, eps, NORM, TYPE)
        acc = tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
        acc_up = acc
        if GATE:
            acc_up = tl.sum(b_up.to(tl.float32) * b_x[None, :], axis=1)
        acc = finish(
            acc, acc_up, p_bias, p_up_bias, p_residual, b_n, b_in_n,
            m * residual_stride + b_n, b_in_n, BIAS, RESIDUAL, GATE, UP_BIAS,
        )  # fmt: skip
        tl.store(p_out + m * out_stride + b_n, acc, mask=b_in_n)


@triton.jit
def _chunks_kernel(
    p_x, p_w, p_bias, p_norm, p_residual, p_up, p_up_bias, p_out,
    x_stride, w_stride, residual_stride, up_stride, out_stride, N, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    UP_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0)  # rows of x are neighbours: they share the weight's lines in L2
    b_n = tl.program_id(1) * BN + tl.arange(0, BN)
    b_in_n = b_n < N
    b_wide = b_n.to(tl.int64)[:, None]
    TYPE: tl.constexpr = p_w.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_row = p_x + i_m * x_stride
    root = 1.0
    if NORM:
        b_squares = tl.zeros([BK], tl.float32)
        for start in range(0, K, BK):
            b_k = start + tl.arange(0, BK)
            b_x = tl.load(p_row + b_k, mask=b_k < K, other=0.0).to(tl.float32)
            b_squares += b_x * b_x
        root = 1.0 / tl.sqrt(tl.sum(b_squares) / K + eps)
    acc = tl.zeros([BN], tl.float32)
    acc_up = tl.zeros([BN], tl.float32)
    for start in range(0, K, BK):
        b_k = start + tl.arange(0, BK)
        b_in_k = b_k < K
        b_in_w = b_in_n[:, None] & b_in_k[None, :]
        b_w = tl.load(p_w + b_wide * w_stride + b_k[None, :], mask=b_in_w, other=0.0)
        b_x = tl.load(p_row + b_k, mask=b_in_k, other=0.0).to(tl.float32)
        if NORM:
            b_x = b_x * root * tl.load(p_norm + b_k, mask=b_in_k, other=0.0).to(tl.float32)
        b_x = b_x.to(TYPE).to(tl.float32)
        acc += tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
        if GATE:
            b_up = tl.load(p_up + b_wide * up_stride + b_k[None, :], mask=b_in_w, other=0.0)
            acc_up += tl.sum(b_up.to(tl.float32) * b_x[None, :], axis=1)
    acc = finish(
        acc, acc_up, p_bias, p_up_bias, p_residual, b_n, b_in_n,
        i_m * residual_stride + b_n, b_in_n, BIAS, RESIDUAL, GATE, UP_BIAS,
    )  # fmt: skip
    tl.store(p_out + i_m * out_stride + b_n, acc, mask=b_in_n)


def run(product: Product, columns: int, chunk: int, warps: int, *, pdl: bool) -> None:
    """Launch for BN = *columns*; K in chunks of *chunk* (a power of two), one tile if it fits."""
    (M, K), N = product.x.shape, product.weight.shape[0]
    blocks = triton.cdiv(N, columns)
    arguments = (*product.tensors, *product.strides, N, product.eps)
    options = {"BN": columns, "K": K, "PDL": pdl, **product.flags, "num_warps": warps}
    if pdl:
        options["launch_pdl"] = True
    if chunk >= K:
        size = triton.next_power_of_2(K)
        _one_tile_kernel[(blocks,)](*arguments, M=M, BK=size, num_stages=1, **options)
    else:
        _chunks_kernel[(M, blocks)](*arguments, BK=chunk, num_stages=2, **options)
