"""Products of 1 to 4 rows by vector arithmetic: every weight is read once, nothing is multiplied
by the matrix units.

A program computes BN columns of the output. With K up to what registers hold it reads the whole
[BN, K] tile of the weight in one go ("one tile": the sweep on an H200 found no loop that beats it),
and the loads of weights stand before anything that depends on the kernel before: with PDL they
overlap its end. Rows of x multiply the tile in registers, one after another; a weight so small that
it is the latency of that which counts is rather read again, from L2, by a program for each row.
Beyond that K goes in chunks, with a program for each row.

A norm multiplies x by its weight on the way in and the sums by the root at the end, so that the
root's own sum is not waited for; nothing is rounded between.
"""

import triton
import triton.language as tl
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.linear_epilogue import SMALL_BYTES, Product, finish


@triton.jit
def _constants(p_bias, p_up_bias, b_n, b_in_n, BIAS: tl.constexpr, UP_BIAS: tl.constexpr):
    """Return the biases of columns ``b_n``, or what stands for them where there are none."""
    b_bias = b_n
    b_up_bias = b_n
    if BIAS:
        b_bias = tl.load(p_bias + b_n, mask=b_in_n, other=0.0)
    if UP_BIAS:
        b_up_bias = tl.load(p_up_bias + b_n, mask=b_in_n, other=0.0)
    return b_bias, b_up_bias


@direct
@triton.jit
def _one_tile_kernel(
    p_x, p_w, p_bias, p_norm, p_residual, p_up, p_up_bias, p_out,
    x_stride, w_stride, residual_stride, up_stride, out_stride, N, eps,
    K: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    UP_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns are neighbours: they share the weight's lines in L2.
    i_m = tl.program_id(0) % PARTS * M
    b_n = tl.program_id(0) // PARTS * BN + tl.arange(0, BN)
    b_k = tl.arange(0, BK)
    b_in_n, b_in_k = b_n < N, b_k < K
    b_in_w = b_in_n[:, None] & b_in_k[None, :]
    b_wide = b_n.to(tl.int64)[:, None]
    TYPE: tl.constexpr = p_w.dtype.element_ty
    POLICY: tl.constexpr = "evict_first" if PARTS == 1 else ""
    b_w = tl.load(
        p_w + b_wide * w_stride + b_k[None, :], mask=b_in_w, other=0.0, eviction_policy=POLICY
    )
    b_up = b_w
    if GATE:
        b_up = tl.load(
            p_up + b_wide * up_stride + b_k[None, :], mask=b_in_w, other=0.0,
            eviction_policy=POLICY,
        )  # fmt: skip
    if NORM:
        b_norm = tl.load(p_norm + b_k, mask=b_in_k, other=0.0).to(tl.float32)
    b_bias, b_up_bias = _constants(p_bias, p_up_bias, b_n, b_in_n, BIAS, UP_BIAS)
    begin(PDL)
    for m in tl.static_range(M):
        i_row = i_m + m
        b_x = tl.load(p_x + i_row * x_stride + b_k, mask=b_in_k, other=0.0).to(tl.float32)
        b_residual = b_n
        if RESIDUAL:
            b_residual = tl.load(p_residual + i_row * residual_stride + b_n, mask=b_in_n, other=0.0)
        if NORM:
            root = 1.0 / tl.sqrt(tl.sum(b_x * b_x) / K + eps)
            b_x = b_x * b_norm
        else:
            b_x = b_x.to(TYPE).to(tl.float32)
        acc = tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
        acc_up = acc
        if GATE:
            acc_up = tl.sum(b_up.to(tl.float32) * b_x[None, :], axis=1)
        if NORM:
            acc, acc_up = acc * root, acc_up * root
        acc = finish(acc, acc_up, b_bias, b_up_bias, b_residual, BIAS, RESIDUAL, GATE, UP_BIAS)
        tl.store(p_out + i_row * out_stride + b_n, acc, mask=b_in_n)


@direct
@triton.jit
def _chunks_kernel(
    p_x, p_w, p_bias, p_norm, p_residual, p_up, p_up_bias, p_out,
    x_stride, w_stride, residual_stride, up_stride, out_stride, N, eps,
    K: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    UP_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0) % PARTS
    b_n = tl.program_id(0) // PARTS * BN + tl.arange(0, BN)
    b_in_n = b_n < N
    b_wide = b_n.to(tl.int64)[:, None]
    TYPE: tl.constexpr = p_w.dtype.element_ty
    b_bias, b_up_bias = _constants(p_bias, p_up_bias, b_n, b_in_n, BIAS, UP_BIAS)
    begin(PDL)
    b_residual = b_n
    if RESIDUAL:
        b_residual = tl.load(p_residual + i_m * residual_stride + b_n, mask=b_in_n, other=0.0)
    b_squares = tl.zeros([BK], tl.float32)
    acc = tl.zeros([BN], tl.float32)
    acc_up = tl.zeros([BN], tl.float32)
    for start in range(0, K, BK):
        b_k = start + tl.arange(0, BK)
        b_in_k = b_k < K
        b_in_w = b_in_n[:, None] & b_in_k[None, :]
        b_w = tl.load(p_w + b_wide * w_stride + b_k[None, :], mask=b_in_w, other=0.0)
        b_x = tl.load(p_x + i_m * x_stride + b_k, mask=b_in_k, other=0.0).to(tl.float32)
        if NORM:
            b_squares += b_x * b_x
            b_x = b_x * tl.load(p_norm + b_k, mask=b_in_k, other=0.0).to(tl.float32)
        else:
            b_x = b_x.to(TYPE).to(tl.float32)
        acc += tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
        if GATE:
            b_up = tl.load(p_up + b_wide * up_stride + b_k[None, :], mask=b_in_w, other=0.0)
            acc_up += tl.sum(b_up.to(tl.float32) * b_x[None, :], axis=1)
    if NORM:
        root = 1.0 / tl.sqrt(tl.sum(b_squares) / K + eps)
        acc, acc_up = acc * root, acc_up * root
    acc = finish(acc, acc_up, b_bias, b_up_bias, b_residual, BIAS, RESIDUAL, GATE, UP_BIAS)
    tl.store(p_out + i_m * out_stride + b_n, acc, mask=b_in_n)


def run(product: Product, columns: int, chunk: int, warps: int, *, pdl: bool) -> None:
    """Launch for BN = *columns*; K in chunks of *chunk* (a power of two), one tile if it fits."""
    (M, K), N = product.x.shape, product.weight.shape[0]
    blocks = cdiv(N, columns)
    arguments = (*product.tensors, *product.strides, N, product.eps)
    options = {"BN": columns, "K": K, "PDL": pdl, **product.flags}
    options |= {"num_warps": warps, "launch_pdl": pdl}
    if chunk >= K:
        size = power_of_two(K)
        each = 1 if product.weight_bytes <= SMALL_BYTES else M
        _one_tile_kernel[(M // each * blocks,)](
            *arguments, M=each, PARTS=M // each, BK=size, num_stages=1, **options
        )
    else:
        _chunks_kernel[(M * blocks,)](*arguments, PARTS=M, BK=chunk, num_stages=2, **options)
