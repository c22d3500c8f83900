"""Products of 5 to 64 rows with small weights by the matrix units, K shared out among the warps.

A program computes BM = 16 rows by BN = 16 columns, and each of its 8 warps multiplies its own slice
of K, all of it at once:

    x [S, BM, BK]  times  weight [S, BN, BK]  →  [S, BM, BN]  →  sum over the S slices

So nothing is a loop: all loads are in flight together, no warp's chain of products is longer than
BK / 16, and with PDL the weights stand in registers, as the matrix units want them, when the kernel
before ends. More rows are more programs, which read the weights again, from L2. That is for weights
of a few MB, where latency is all; a weight that has to be streamed is better served by tiles.

A norm multiplies x by its weight on the way in and the sums by the root at the end, which is found
beside the product. What is rounded to the weight's type then lacks the root: of no consequence but
for float16's range, so there the root is found first.
"""

import torch
import triton
import triton.language as tl
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.linear_epilogue import Product, finish

ROWS, COLUMNS, SLICES = 16, 16, 8
MOST_DEPTH = 256  # of a slice: 64 registers a thread for x, and as many for the weight
MOST_K = 2 * SLICES * MOST_DEPTH  # in two halves


@triton.jit
def _weight(p_w, b_n, b_in_n, b_k, stride, K: tl.constexpr):
    """Return columns ``b_n`` of a weight at ``b_k`` [S, BK]: [S, BN, BK]."""
    p_tile = p_w + b_n.to(tl.int64)[None, :, None] * stride + b_k[:, None, :]
    return tl.load(p_tile, mask=b_in_n[None, :, None] & (b_k < K)[:, None, :], other=0.0)


@triton.jit
def _normed(b_x, b_norm, eps, K: tl.constexpr, FIRST: tl.constexpr, TYPE: tl.constexpr):
    """Return x [S, BM, BK] times the norm's weight, rounded to TYPE, and its sums of squares."""
    b_wide = b_x.to(tl.float32)
    b_squares = tl.sum(tl.sum(b_wide * b_wide, 2), 0)
    if FIRST:
        b_wide = b_wide / tl.sqrt(b_squares / K + eps)[None, :, None]
    return (b_wide * b_norm.to(tl.float32)[:, None, :]).to(TYPE), b_squares


@direct
@triton.jit(do_not_specialize=["M"])
def _slices_kernel(
    p_x, p_w, p_bias, p_norm, p_residual, p_up, p_up_bias, p_out,
    x_stride, w_stride, residual_stride, up_stride, out_stride, N, eps, M,
    K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HALVES: tl.constexpr, FIRST: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    UP_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_m = tl.program_id(1) * BM + tl.arange(0, BM)
    b_k = tl.arange(0, S)[:, None] * BK + tl.arange(0, BK)[None, :]
    b_in_n, b_in_m = b_n < N, b_m < M
    TYPE: tl.constexpr = p_w.dtype.element_ty
    b_w = _weight(p_w, b_n, b_in_n, b_k, w_stride, K)
    if HALVES:
        b_w_late = _weight(p_w, b_n, b_in_n, b_k + S * BK, w_stride, K)
    if GATE:
        b_up = _weight(p_up, b_n, b_in_n, b_k, up_stride, K)
        if HALVES:
            b_up_late = _weight(p_up, b_n, b_in_n, b_k + S * BK, up_stride, K)
    if NORM:
        b_norm = tl.load(p_norm + b_k, mask=b_k < K, other=0.0)
    b_bias = b_n
    b_up_bias = b_n
    if BIAS:
        b_bias = tl.load(p_bias + b_n, mask=b_in_n, other=0.0)
    if UP_BIAS:
        b_up_bias = tl.load(p_up_bias + b_n, mask=b_in_n, other=0.0)
    begin(PDL)
    b_wide, b_in = b_m.to(tl.int64)[:, None], b_in_m[:, None] & b_in_n[None, :]
    p_rows = p_x + b_m.to(tl.int64)[None, :, None] * x_stride + b_k[:, None, :]
    b_x = tl.load(p_rows, mask=b_in_m[None, :, None] & (b_k < K)[:, None, :], other=0.0)
    b_residual = b_n
    if RESIDUAL:
        p_tile = p_residual + b_wide * residual_stride + b_n[None, :]
        b_residual = tl.load(p_tile, mask=b_in, other=0.0)
    if NORM:
        b_x, b_squares = _normed(b_x, b_norm, eps, K, FIRST, TYPE)
    b_x = b_x.to(TYPE)
    acc = tl.dot(b_x, tl.permute(b_w, (0, 2, 1)), input_precision="ieee")
    acc_up = acc
    if GATE:
        acc_up = tl.dot(b_x, tl.permute(b_up, (0, 2, 1)), input_precision="ieee")
    if HALVES:
        in_late = (b_k + S * BK < K)[:, None, :]
        b_x = tl.load(p_rows + S * BK, mask=b_in_m[None, :, None] & in_late, other=0.0).to(TYPE)
        acc = tl.dot(b_x, tl.permute(b_w_late, (0, 2, 1)), acc, input_precision="ieee")
        if GATE:
            b_late = tl.permute(b_up_late, (0, 2, 1))
            acc_up = tl.dot(b_x, b_late, acc_up, input_precision="ieee")
    b_sum = tl.sum(acc, 0)
    b_sum_up = b_sum
    if GATE:
        b_sum_up = tl.sum(acc_up, 0)
    if NORM and not FIRST:
        b_root = (1.0 / tl.sqrt(b_squares / K + eps))[:, None]
        b_sum, b_sum_up = b_sum * b_root, b_sum_up * b_root
    b_out = finish(
        b_sum, b_sum_up, b_bias, b_up_bias, b_residual, BIAS, RESIDUAL, GATE, UP_BIAS
    )  # fmt: skip
    tl.store(p_out + b_wide * out_stride + b_n[None, :], b_out, mask=b_in)


def takes(product: Product) -> bool:
    """Tell whether the kernel can do *product*."""
    K = product.x.shape[1]
    whole = K <= SLICES * MOST_DEPTH
    return product.weight.element_size() == 2 and (
        whole or (K <= MOST_K and product.norm is None and product.up is None)
    )


def run(product: Product, *, pdl: bool) -> None:
    """Launch for any number of rows."""
    (M, K), N = product.x.shape, product.weight.shape[0]
    depth = min(MOST_DEPTH, max(16, power_of_two(cdiv(K, SLICES))))
    _slices_kernel[(cdiv(N, COLUMNS), cdiv(M, ROWS))](
        *product.tensors, *product.strides, N, product.eps, M,
        K=K, S=SLICES, BM=ROWS, BN=COLUMNS, BK=depth, HALVES=SLICES * depth < K,
        FIRST=product.weight.dtype == torch.float16, PDL=pdl, **product.flags,
        num_warps=SLICES, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
