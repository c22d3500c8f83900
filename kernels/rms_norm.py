"""RMSNorm, with the addition of the residual before it and, for Gemma, a norm before that.

    h   = x                                     plain
    h   = residual + x                          with a residual, written to ``residual_out``
    h   = residual + norm(x) * inner_weight     with an inner norm: Gemma's norm of what a layer
                                                adds, its addition, and the next norm in one launch
    out = h / sqrt(mean(h²) + eps) * weight

All arithmetic is float32. The new residual is rounded to its own type first and normalised as
rounded, so that it does not matter whether addition and norm are one launch or two. The residual
may be wider than x: float16 Gemma keeps it in float32. Weights are float32 and final: 1 + weight
is the caller's addition. One program computes one row, which it holds in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import direct, power_of_two

# Warps of a program by padded width. Rows are few in decode: a row's latency is what counts, and
# 4 to 8 elements a thread (one 16-byte load) keep it short.
WARPS: dict[str, dict[int, int]] = {
    "NVIDIA H200": {1024: 4, 2048: 8, 4096: 8, 8192: 16},
}
DEFAULT_WARPS = {1024: 4, 2048: 4, 4096: 8, 8192: 16}
MOST_WARPS = 16


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    inner_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, new residual), both [T, H] in float64, of x [T, H]; see the module."""
    h = x.double()
    if inner_weight is not None:
        h = _normalised(h, eps) * inner_weight.double()
    if residual is not None:
        h = (residual.double() + h).to(residual.dtype).double()
    return _normalised(h, eps) * weight.double(), h


def _normalised(h: Tensor, eps: float) -> Tensor:
    return h / torch.sqrt(h.square().mean(-1, keepdim=True) + eps)


@direct
@triton.jit
def _rms_norm_kernel(
    p_x,
    p_weight,
    p_inner_weight,
    p_residual,
    p_residual_out,
    p_out,
    stride_x,
    stride_residual,
    stride_residual_out,
    stride_out,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_INNER: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_h = tl.arange(0, BLOCK)
    mask = i_h < H
    b_weight = tl.load(p_weight + i_h, mask=mask, other=0.0)
    b_inner = b_weight
    if HAS_INNER:
        b_inner = tl.load(p_inner_weight + i_h, mask=mask, other=0.0)
    begin(PDL)
    b_h = tl.load(p_x + i_row * stride_x + i_h, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:  # on its way while the inner norm is computed
        b_residual = tl.load(p_residual + i_row * stride_residual + i_h, mask=mask, other=0.0)
    if HAS_INNER:
        b_h = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / H + eps) * b_inner
    if HAS_RESIDUAL:
        b_sum = (b_residual.to(tl.float32) + b_h).to(p_residual_out.dtype.element_ty)
        tl.store(p_residual_out + i_row * stride_residual_out + i_h, b_sum, mask=mask)
        b_h = b_sum.to(tl.float32)
    b_out = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / H + eps) * b_weight
    tl.store(p_out + i_row * stride_out + i_h, b_out.to(p_out.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    inner_weight: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the norm of x [T, H] to *out* [T, H], after adding x to *residual* if there is one.

    *weight*, *inner_weight*: float32 [H], contiguous. *residual* [T, H] and its sum with x,
    *residual_out* [T, H], are of one type and may be one tensor; *out* may be x. Rows may be apart
    by any stride; elements of a row are adjacent. *pdl*: see ``zlm.kernels.chain``.
    """
    rows, width = x.shape
    assert weight.dtype == torch.float32 and weight.shape == (width,)
    assert (residual is None) == (residual_out is None)
    assert x.stride(1) == 1 and out.stride(1) == 1 and out.shape == x.shape
    if not rows:
        return
    block = power_of_two(width)
    # An absent tensor's argument is never read: any pointer stands in for it.
    old = x if residual is None else residual
    new = x if residual_out is None else residual_out
    _rms_norm_kernel[(rows,)](
        x,
        weight,
        weight if inner_weight is None else inner_weight,
        old,
        new,
        out,
        x.stride(0),
        old.stride(0),
        new.stride(0),
        out.stride(0),
        eps,
        H=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_INNER=inner_weight is not None,
        PDL=pdl,
        num_warps=_warps(x.device, block),
        launch_pdl=pdl,
    )


def _warps(device: torch.device, block: int) -> int:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return WARPS.get(name, DEFAULT_WARPS).get(max(block, 1024), MOST_WARPS)
