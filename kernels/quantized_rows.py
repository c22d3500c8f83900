"""Rows of activations as float8 (e4m3), each with a scale of its own, or one for each group.

    q = round(y / s),  s = max |y| / 448        y = x,  or the RMS norm of x,
                                                or act(gate) * up, x being [gate | up]

or s is given, the same for all (static), and what is beyond 448 s becomes that.

One program a row, which it holds in registers. Columns stand in the order of ``quantized_codes``,
as the weight's do: their product is the same. The library's float8 product multiplies its sums by s
and by the scale of the weight's row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels import gated
from zlm.kernels.chain import begin
from zlm.kernels.launch import direct, power_of_two
from zlm.kernels.linear_epilogue import ACTIVATIONS, activate

LARGEST = tl.constexpr(448.0)  # of e4m3
LEAST = tl.constexpr(1e-12)  # scale: rows of zeros have one too


def reference(
    x: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    group: int = 0,
    static: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return y / s, not yet rounded, and s [M], of groups [M, K / group], in float64."""
    y = gated.reference(x, activation) if activation else x.double()
    if norm is not None:
        y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.double()
    groups = y.view(len(y), -1, group or y.shape[1])
    scale = (groups.abs().amax(-1) / LARGEST.value).clamp(min=LEAST.value)
    if static:
        scale = torch.full_like(scale, static)
        most = LARGEST.value * static
        groups = groups.clamp(-most, most)
    return (groups / scale[..., None]).view(y.shape), scale if group else scale[:, 0]


@triton.jit
def _in_order(p_x, K: tl.constexpr, BLOCK: tl.constexpr):
    """Return K numbers in the order of codes, those beyond 0: a thread loads 8 and the next 8."""
    b_at = tl.arange(0, BLOCK // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
    b_in = b_at < K  # a multiple of 16
    b_low = tl.load(p_x + b_at, mask=b_in, other=0.0)
    b_high = tl.load(p_x + b_at + 8, mask=b_in, other=0.0)
    return tl.reshape(tl.join(b_low, b_high), [BLOCK])


@direct
@triton.jit
def _rows_kernel(
    p_x, p_norm, p_out, p_scales, x_stride, out_stride, eps, static,
    K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    b_place = tl.arange(0, BLOCK)
    b_in = b_place < K
    if NORM:
        b_norm = _in_order(p_norm, K, BLOCK)
    begin(PDL)
    p_row = p_x + i_row * x_stride
    b_x = _in_order(p_row, K, BLOCK).to(tl.float32)
    if GATE:
        b_x = activate(b_x, GATE) * _in_order(p_row + K, K, BLOCK).to(tl.float32)
    if NORM:
        b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / K + eps) * b_norm
    if STATIC:
        b_x = tl.minimum(tl.maximum(b_x, -LARGEST * static), LARGEST * static)
    if C == K:
        scale = tl.maximum(tl.max(tl.abs(b_x), 0) / LARGEST, LEAST)
        if STATIC:
            scale = static
        b_q = b_x * (1.0 / scale)
        tl.store(p_scales + i_row, scale)
    else:
        GROUPS: tl.constexpr = BLOCK // C
        b_groups = tl.reshape(b_x, [GROUPS, C])
        b_scale = tl.maximum(tl.max(tl.abs(b_groups), 1) / LARGEST, LEAST)
        if STATIC:
            b_scale = b_scale * 0.0 + static
        b_q = tl.reshape(b_groups * (1.0 / b_scale)[:, None], [BLOCK])
        i_group = tl.arange(0, GROUPS)
        tl.store(p_scales + i_row * (K // C) + i_group, b_scale, mask=i_group < K // C)
    tl.store(p_out + i_row * out_stride + b_place, b_q.to(p_out.dtype.element_ty), mask=b_in)


def quantize(
    x: Tensor,
    *,
    out: Tensor,
    scales: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    group: int = 0,
    static: float = 0.0,
    pdl: bool = False,
) -> None:
    """Write x [M, K], or its norm with weight *norm* float32 [K], to *out* float8_e4m3fn [M, K].

    With an *activation* x is [M, 2 K]. *scales*: float32 [M, 1], or with a *group*, a power of two,
    [M, K / group], contiguous. *static*: what they all are to be, not 0. Rows of x may be strided.
    """
    rows, width = out.shape
    group = group or width
    assert x.shape == (rows, width * (2 if activation else 1)) and width % group == 0
    assert scales.numel() == rows * (width // group) and scales.is_contiguous()
    assert out.dtype == torch.float8_e4m3fn and not (activation and norm is not None)
    assert x.stride(1) == 1 and out.stride(1) == 1
    if not rows:
        return
    block = power_of_two(width)
    _rows_kernel[(rows,)](
        x, norm, out, scales, x.stride(0), out.stride(0), float(eps), static,
        K=width, C=group, BLOCK=block, NORM=norm is not None, GATE=ACTIVATIONS[activation],
        STATIC=static > 0.0, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
