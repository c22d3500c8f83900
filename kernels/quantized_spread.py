"""Quantized weights as numbers again: some rows, for a library's product or as an embedding.

    out[i, k] = scale * w[row i, k]        rows ``start + i``, or those that ids name

A thread writes 8 neighbours: these are 8 int16 elements side by side, each with one of its codes.
Bound by what is written.
"""

import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.quantized_codes import Codes
from zlm.kernels.quantized_numbers import numbers

BLOCK, WARPS = 2048, 8


@direct
@triton.jit
def _spread_kernel(
    p_w, p_scales, p_beside, p_ids, p_out, w_stride, scale_stride, out_stride, factor,
    K: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    BESIDE: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i_out = tl.program_id(0).to(tl.int64)
    i_row = i_out
    if IDS:
        i_row = tl.load(p_ids + i_out).to(tl.int64)
    b_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_k < K
    SPAN: tl.constexpr = 32 if KIND % 3 == 0 else 16
    b_code = tl.load(p_w + i_row * w_stride + b_k // SPAN * 8 + b_k % 8, mask=b_in, other=0)
    b_code = b_code.to(tl.int32) >> (b_k % SPAN // 8 * (16 * 8 // SPAN))
    b_value = numbers(b_code.to(tl.int16), 0.0, tl.float32, KIND, False)
    b_at = i_row * scale_stride + b_k // C
    b_scale = tl.load(p_scales + b_at, mask=b_in, other=0.0).to(tl.float32)
    if BESIDE == 2:
        b_offset = tl.load(p_beside + b_at, mask=b_in, other=0.0).to(tl.float32)
        b_value = b_value * b_scale + b_offset
    elif BESIDE == 1:
        b_zero = tl.load(p_beside + b_at, mask=b_in, other=0).to(tl.float32)
        b_value = (b_value - b_zero) * b_scale
    else:
        b_value = (b_value - ZERO) * b_scale
    if IDS:
        b_value = b_value.to(p_out.dtype.element_ty).to(tl.float32) * factor
    tl.store(p_out + i_out * out_stride + b_k, b_value, mask=b_in)


def spread(weight: Codes, *, out: Tensor, pdl: bool = False) -> None:
    """Write the weight [N, K] to *out* [N, K], of any float type."""
    _launch(weight, None, 1.0, out, pdl=pdl)


def embedding(
    token_ids: Tensor, weight: Codes, scale: float, *, out: Tensor, pdl: bool = False
) -> None:
    """Write rows *token_ids*, integers [T], times *scale* to *out* [T, K]."""
    _launch(weight, token_ids, scale, out, pdl=pdl)


def _launch(weight: Codes, ids: Tensor | None, factor: float, out: Tensor, *, pdl: bool) -> None:
    rows, columns = out.shape
    assert columns == weight.shape[1] and out.stride(1) == 1
    assert rows == (weight.shape[0] if ids is None else ids.shape[0])
    if not rows:
        return
    kind, beside = weight.beside
    block = min(BLOCK, power_of_two(columns))
    codes = weight.halves
    _spread_kernel[(rows, cdiv(columns, block))](
        codes, weight.scales, beside, ids, out, codes.stride(0), weight.scales.stride(0),
        out.stride(0), float(factor),
        K=columns, C=weight.group, KIND=weight.kind, ZERO=weight.zero, BESIDE=kind, BLOCK=block,
        IDS=ids is not None, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
