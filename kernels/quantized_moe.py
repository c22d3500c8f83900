"""The products of a mixture of experts whose weights are codes; the rest is ``zlm.kernels.moe``'s.

    inner    act(x @ gate.T + bias) * (x @ up.T + bias)      of every pair (token, expert), [T k, I]
    outer    share * (inner @ down.T + bias)                 [T k, H]; or inner has x * share

All experts of a layer are one matrix of codes, their rows one after another. Pairs and tiles are
those of ``moe_plan``, the arithmetic is ``quantized_tile``'s.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels import quantized_codes, quantized_tile
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct
from zlm.kernels.moe import Activation, ExpertTensors, gated
from zlm.kernels.quantized_codes import Codes
from zlm.kernels.quantized_tile import sums

# Pairs of an expert at most: BM, BN, stages, warps. Not tuned.
TILES = ((16, (16, 64, 3, 4)), (64, (32, 64, 3, 4)), (2**31, (64, 64, 3, 4)))
FIXED_TILE = (16, 64, 3, 4)  # where results may not depend on company


@dataclass(frozen=True, slots=True)
class ExpertCodes:
    """All experts of a layer: gate and up [E * 2 I, H], down [E * H, I]; biases as in ``moe``."""

    gate_up: Codes
    down: Codes
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def spread(self, experts: int) -> ExpertTensors:
        """Return them in float64."""
        both, down = (
            quantized_codes.spread(codes).view(experts, -1, codes.shape[1])
            for codes in (self.gate_up, self.down)
        )
        return ExpertTensors(both, down, self.gate_up_bias, self.down_bias)


@direct
@triton.jit
def _codes_kernel(
    p_x, p_w, p_scales, p_beside, p_bias, p_shares, p_out, p_order, p_tiles,
    x_stride, w_stride, scale_stride, out_stride, N, TOP,
    K: tl.constexpr, C: tl.constexpr, CODES: tl.constexpr, ZERO: tl.constexpr,
    BESIDE: tl.constexpr, MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BIAS: tl.constexpr, SHARES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``moe``'s; CODES: their kind."""
    begin(PDL)
    p_tile = p_tiles + tl.program_id(1) * 3
    i_expert = tl.load(p_tile).to(tl.int64)
    if i_expert >= 0:
        start, count = tl.load(p_tile + 1), tl.load(p_tile + 2)
        i_m = tl.arange(0, BM)
        b_n = tl.program_id(0) * BN + tl.arange(0, BN)
        b_in_m, b_in_n = i_m < count, b_n < N
        b_pair = tl.load(p_order + start + i_m, mask=b_in_m, other=0).to(tl.int64)
        more = N.to(tl.int64)
        i_first = i_expert * (2 * more if KIND else more)
        acc, acc_up = sums(
            p_x + (b_pair // TOP)[None, :] * x_stride, b_in_m, p_w, p_scales, p_beside,
            i_first + b_n, b_in_n, more, w_stride, scale_stride, 0, tl.cdiv(K, BK),
            K, C, CODES, ZERO, BESIDE, MODE, BK, KIND, ASM,
        )  # fmt: skip
        if SHARES:
            b_share = tl.load(p_shares + b_pair, mask=b_in_m, other=0.0)[None, :]
            if KIND:
                acc, acc_up = acc * b_share, acc_up * b_share
        if BIAS:
            p_row = p_bias + i_first + b_n
            acc += tl.load(p_row, mask=b_in_n, other=0.0).to(tl.float32)[:, None]
            if KIND:
                acc_up += tl.load(p_row + N, mask=b_in_n, other=0.0).to(tl.float32)[:, None]
        if KIND:
            acc = gated(acc, acc_up, KIND, LIMIT, ALPHA)
        elif SHARES:
            acc = acc * b_share
        p_to = p_out + b_pair[None, :] * out_stride + b_n[:, None]
        tl.store(p_to, acc.to(p_out.dtype.element_ty), mask=b_in_n[:, None] & b_in_m[None, :])


def tile_setting(pairs: int, experts: int, *, fixed: bool) -> tuple[int, int, int, int]:
    """Return BM, BN, stages and warps for *pairs* pairs of tokens and *experts* experts."""
    return FIXED_TILE if fixed else next(tile for most, tile in TILES if pairs <= most * experts)


def inner(
    x: Tensor,
    weights: ExpertCodes,
    order: Tensor,
    tiles: Tensor,
    setting: tuple[int, int, int, int],
    activation: Activation,
    *,
    out: Tensor,
    shares: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write act(gate) * up of every pair to *out* [T k, I], for x [T, H].

    order, tiles: of ``moe_plan.plan`` with the setting's BM. shares: [T, k], that multiply x.
    """
    top = out.shape[0] // x.shape[0]
    weight, bias = weights.gate_up, weights.gate_up_bias
    _launch(x, weight, bias, shares, out, order, tiles, setting, activation, top=top, pdl=pdl)


def outer(
    x: Tensor,
    weights: ExpertCodes,
    shares: Tensor | None,
    order: Tensor,
    tiles: Tensor,
    setting: tuple[int, int, int, int],
    *,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Write share * down(x) of every pair to *out* [T k, H], for x [T k, I]; shares [T, k] or 1."""
    weight, bias = weights.down, weights.down_bias
    _launch(x, weight, bias, shares, out, order, tiles, setting, Activation(""), top=1, pdl=pdl)


def _launch(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None,
    shares: Tensor | None,
    out: Tensor,
    order: Tensor,
    tiles: Tensor,
    setting: tuple[int, int, int, int],
    activation: Activation,
    *,
    top: int,
    pdl: bool,
) -> None:
    (pairs, N), kind = out.shape, activation.kind
    assert order.shape == (pairs,) and x.shape[0] * top == pairs and x.shape[1] == weight.shape[1]
    assert weight.shape[0] % (2 * N if kind else N) == 0 and x.stride(1) == out.stride(1) == 1
    if not tiles.shape[0]:
        return
    BM, BN, stages, warps = setting
    mode, chunk = quantized_tile.mode_and_chunk(weight)
    codes = weight.halves
    beside_kind, beside = weight.beside
    _codes_kernel[(cdiv(N, BN), tiles.shape[0])](
        x, codes, weight.scales, beside, bias, shares, out, order, tiles,
        x.stride(0), codes.stride(0), weight.scales.stride(0), out.stride(0), N, top,
        K=weight.shape[1], C=weight.group, CODES=weight.kind, ZERO=weight.zero,
        BESIDE=beside_kind, MODE=mode, BM=BM, BN=BN, BK=chunk, KIND=kind,
        LIMIT=activation.limit, ALPHA=activation.alpha, BIAS=bias is not None,
        SHARES=shares is not None, ASM=quantized_tile.uses_asm(x), PDL=pdl, num_warps=warps,
        num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
