"""Products of up to 64 rows by the matrix units: [BM, BK] tiles of x by [BN, BK] tiles of weight.

A loop over K with loads several stages ahead; all rows in one tile (BM 16, 32 or 64), so a weight
is read once. No split of K: a small output leaves SMs idle, and still beats a second launch. With a
norm the roots are found in a first loop over x, which stays in L2, and tiles of x are normalised
and rounded to the weight's type on their way to the product.
"""

import triton
import triton.language as tl
from zlm.kernels.linear_epilogue import Product, finish

SHARED_BYTES = 200 * 1024  # of the 227 kB that a program may use on Hopper


@triton.jit
def _tile_kernel(
    p_x, p_w, p_bias, p_norm, p_residual, p_up, p_up_bias, p_out,
    x_stride, w_stride, residual_stride, up_stride, out_stride, N, eps, M,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    UP_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_m = tl.program_id(1) * BM + tl.arange(0, BM)
    b_in_n, b_in_m = b_n < N, b_m < M
    TYPE: tl.constexpr = p_w.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_k = tl.arange(0, BK)
    p_rows = p_x + b_m.to(tl.int64)[:, None] * x_stride
    p_columns = p_w + b_n.to(tl.int64)[None, :] * w_stride
    p_up_columns = p_columns
    if GATE:
        p_up_columns = p_up + b_n.to(tl.int64)[None, :] * up_stride
    b_root = tl.zeros([BM], tl.float32)
    if NORM:
        for start in range(0, K, BK):
            b_in = b_in_m[:, None] & (start + b_k < K)[None, :]
            b_x = tl.load(p_rows + start + b_k[None, :], mask=b_in, other=0.0).to(tl.float32)
            b_root += tl.sum(b_x * b_x, axis=1)
        b_root = 1.0 / tl.sqrt(b_root / K + eps)
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
            b_x = b_x.to(tl.float32) * b_root[:, None] * b_norm[None, :]
        b_x = b_x.to(TYPE)
        b_w = tl.load(p_columns + b_at[:, None], mask=b_in_w, other=0.0)
        acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
        if GATE:
            b_up = tl.load(p_up_columns + b_at[:, None], mask=b_in_w, other=0.0)
            acc_up = tl.dot(b_x, b_up, acc_up, input_precision="ieee")
    b_wide, b_in = b_m.to(tl.int64)[:, None], b_in_m[:, None] & b_in_n[None, :]
    acc = finish(
        acc, acc_up, p_bias, p_up_bias, p_residual, b_n, b_in_n,
        b_wide * residual_stride + b_n[None, :], b_in, BIAS, RESIDUAL, GATE, UP_BIAS,
    )  # fmt: skip
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
    depth = max(16, min(depth, triton.next_power_of_2(K)))
    per_k = rows * max(size, product.x.element_size())
    per_k += columns * size * (2 if product.up is not None else 1)
    while depth > 32 and per_k * depth * 2 > SHARED_BYTES:
        depth //= 2
    stages = max(1, min(stages, SHARED_BYTES // (per_k * depth)))
    options = {"BM": rows, "BN": columns, "BK": depth, "K": K, "PDL": pdl, **product.flags}
    if pdl:
        options["launch_pdl"] = True
    grid = (triton.cdiv(N, columns), triton.cdiv(M, rows))
    _tile_kernel[grid](
        *product.tensors, *product.strides, N, product.eps, M,
        WHOLE=K % depth == 0, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
