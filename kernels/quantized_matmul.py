"""Products of float8 (e4m3) with float8, for many rows: both are read as they are.

    out[m, n] = x_scale[m] * w_scale[n] * (x[m] . w[n])  + bias[n] + residual[m, n]
    out[m, n] = sum over groups g of  x_scale[m, g] * w_scale[n, g] * (x[m, g] . w[n, g])  + ...

A group is 128 columns: so store DeepSeek's and Qwen's checkpoints their weights, with the same
scale for 128 rows; x is rounded in groups too (``quantized_rows``). A group is one step of the loop
over K: its sum leaves the matrix units in float32 and is scaled there. Tiles of neighbouring
programs share rows of the weight. With few tiles K is split among programs, whose sums (float32) a
second launch adds up in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels import quantized_tile
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct
from zlm.kernels.quantized_codes import FLOAT, Codes

GROUP = 128  # columns of a group, and of a step of the loop
BAND = 8  # tiles of rows that take turns with a tile of columns
# Rows of x at most: BM, BN, stages, warps. Not tuned.
TILES = ((64, (64, 128, 4, 4)), (2**31, (128, 128, 3, 8)))
PROGRAMS = 2 * 132  # at least so many, if K can be split for it
MOST_SPLITS, LEAST_CHUNKS = 8, 4  # of K; of a split


@direct
@triton.jit(do_not_specialize=["M", "chunks"])
def _matmul_kernel(
    p_x, p_w, p_x_scales, p_w_scales, p_bias, p_residual, p_out, p_parts, x_stride, w_stride,
    x_scale_stride, w_scale_stride, residual_stride, out_stride, N, M, chunks,
    K: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BAND: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    i_band = tl.program_id(0) // (BAND * columns)
    high = tl.minimum(rows - i_band * BAND, BAND)
    i_within = tl.program_id(0) % (BAND * columns)
    b_m = (i_band * BAND + i_within % high) * BM + tl.arange(0, BM)
    b_n = i_within // high * BN + tl.arange(0, BN)
    b_in_m, b_in_n, b_k = b_m < M, b_n < N, tl.arange(0, BK)
    b_m_wide, b_n_wide = b_m.to(tl.int64), b_n.to(tl.int64)
    p_rows = p_x + b_m_wide[:, None] * x_stride + b_k[None, :]
    p_columns = p_w + b_n_wide[None, :] * w_stride + b_k[:, None]
    first = tl.program_id(1) * chunks
    acc = tl.zeros([BM, BN], tl.float32)
    for i in range(first, tl.minimum(first + chunks, tl.cdiv(K, BK))):
        b_in_x, b_in_w = b_in_m[:, None], b_in_n[None, :]
        if K % BK != 0:
            b_in_x = b_in_x & (i * BK + b_k < K)[None, :]
            b_in_w = b_in_w & (i * BK + b_k < K)[:, None]
        b_x = tl.load(p_rows + i * BK, mask=b_in_x, other=0.0)
        b_w = tl.load(p_columns + i * BK, mask=b_in_w, other=0.0)
        if C == K:
            acc = tl.dot(b_x, b_w, acc)
        else:
            b_x_scale = tl.load(p_x_scales + b_m_wide * x_scale_stride + i, mask=b_in_m, other=0.0)
            b_w_scale = tl.load(p_w_scales + b_n_wide * w_scale_stride + i, mask=b_in_n, other=0.0)
            acc += tl.dot(b_x, b_w) * (b_x_scale[:, None] * b_w_scale.to(tl.float32)[None, :])
    if C == K:
        b_x_scale = tl.load(p_x_scales + b_m_wide * x_scale_stride, mask=b_in_m, other=0.0)
        b_w_scale = tl.load(p_w_scales + b_n_wide * w_scale_stride, mask=b_in_n, other=0.0)
        acc *= b_x_scale[:, None] * b_w_scale.to(tl.float32)[None, :]
    b_in = b_in_m[:, None] & b_in_n[None, :]
    if SPLIT:
        p_part = p_parts + (tl.program_id(1).to(tl.int64) * M + b_m_wide[:, None]) * N
        tl.store(p_part + b_n[None, :], acc, mask=b_in)
    else:
        if BIAS:
            acc += tl.load(p_bias + b_n, mask=b_in_n, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            p_tile = p_residual + b_m_wide[:, None] * residual_stride + b_n[None, :]
            acc += tl.load(p_tile, mask=b_in, other=0.0).to(tl.float32)
        p_to = p_out + b_m_wide[:, None] * out_stride + b_n[None, :]
        tl.store(p_to, acc.to(p_out.dtype.element_ty), mask=b_in)


def takes_groups(weight: Codes) -> bool:
    """Tell whether *weight* is float8 with scales of groups that the kernel has."""
    return weight.kind == FLOAT and weight.group == GROUP and weight.shape[1] > GROUP


def cut(rows: int, weight: Codes) -> tuple[int, int]:
    """Return into how many parts K is split for *rows* rows, and the chunks of each."""
    N, K = weight.shape
    BM, BN, _, _ = _tile(rows)
    chunks, programs = cdiv(K, GROUP), cdiv(rows, BM) * cdiv(N, BN)
    splits = max(1, min(MOST_SPLITS, chunks // LEAST_CHUNKS, round(PROGRAMS / programs)))
    each = cdiv(chunks, splits)
    return cdiv(chunks, each), each


def scratch_values(rows: int, weight: Codes) -> int:
    """Return how many float32 numbers a product of *rows* rows needs for partial sums."""
    splits, _ = cut(rows, weight)
    return splits * rows * weight.shape[0] if splits > 1 else 0


def matmul(
    q: Tensor,
    scales: Tensor,
    weight: Codes,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    scratch: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the product of q, float8_e4m3fn [M, K], with *weight* [N, K] to *out* [M, N].

    Columns of q stand in the order of the codes (``quantized_rows``). scales: float32 [M, 1], or in
    groups [M, K / 128]. bias [N]; residual [M, N], which may be *out*. scratch: float32, at least
    ``scratch_values`` of them, not needed if that is 0.
    """
    (rows, K), N = q.shape, weight.shape[0]
    grouped = takes_groups(weight)
    assert q.dtype == torch.float8_e4m3fn and weight.kind == FLOAT and weight.shape[1] == K
    assert grouped or weight.group == K
    assert scales.shape == (rows, K // GROUP if grouped else 1) and out.shape == (rows, N)
    assert residual is None or residual.shape == out.shape
    if not rows:
        return
    BM, BN, stages, warps = _tile(rows)
    splits, each = cut(rows, weight)
    assert splits == 1 or (scratch is not None and scratch.dtype == torch.float32)
    stride = 0 if residual is None else residual.stride(0)
    _matmul_kernel[(cdiv(rows, BM) * cdiv(N, BN), splits)](
        q, weight.data, scales, weight.scales, bias, residual, out, scratch, q.stride(0),
        weight.data.stride(0), scales.stride(0), weight.scales.stride(0), stride, out.stride(0), N,
        rows, each,
        K=K, C=weight.group, BM=BM, BN=BN, BK=GROUP, BAND=BAND, SPLIT=splits > 1,
        BIAS=bias is not None, RESIDUAL=residual is not None, PDL=pdl, num_warps=warps,
        num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        assert scratch is not None
        quantized_tile.add_up(scratch, splits, bias, residual, out, 0, pdl=pdl)


def _tile(rows: int) -> tuple[int, int, int, int]:
    return next(tile for most, tile in TILES if rows <= most)
