"""The products of a mixture of experts: of each tile's rows with its expert's weights.

    inner    act(x @ gate.T + bias) * (x @ up.T + bias)      of every pair (token, expert), [T k, I]
    outer    share * (inner @ down.T + bias)                 [T k, H]; or inner has x * share
    combine  residual + the sum over a token's k pairs       [T, H]

Pairs and tiles are those of ``zlm.kernels.moe_plan``: a program takes the rows of one tile, where
they stand, and BN columns of the expert's weight, [E, N, K] of all experts in one tensor. Sums are
float32 and over K in one order, and pairs of a token are added in the order of its experts: no
atomics, and a token's result does not depend on its company as long as tiles are the same.

BM follows from how many pairs an expert has on average, which shapes alone say: few rows (a decode
step) read all weights of the experts that they chose, and are bound by that.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.linear_epilogue import ACTIVATIONS, activate

CLAMPED = tl.constexpr(3)  # of a kernel's KIND, beside those of ACTIVATIONS
COMBINE_BLOCK = 1024  # columns of a program of ``combine``
# Pairs of an expert at most: BM, BN, BK, stages, warps. Not tuned: products of this shape on one
# card decide, and none has been measured yet.
TILES = (
    (16, (16, 64, 64, 4, 4)),
    (64, (32, 64, 64, 4, 4)),
    (2**31, (64, 64, 64, 3, 4)),
)
WIDE_TILE = (16, 32, 32, 2, 4)  # of float32, which no matrix unit multiplies exactly
FIXED_TILE = (16, 64, 64, 3, 4)  # of 2-byte types where results may not depend on company


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between gate and up.

    silu and gelu_tanh:  act(gate) * up.  clamped:  (up + 1) * gate * sigmoid(alpha * gate),  with
    gate at most the limit, and up within it on either side.
    """

    name: str
    limit: float = 0.0
    alpha: float = 0.0

    @property
    def kind(self) -> int:
        return CLAMPED.value if self.name == "clamped" else ACTIVATIONS[self.name]

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the gated product in plain torch."""
        if self.name == "clamped":
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            return (up + 1) * gate * torch.sigmoid(self.alpha * gate)
        return (F.silu(gate) if self.name == "silu" else F.gelu(gate, approximate="tanh")) * up


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """All experts of a layer: gate and up [E, 2 I, H], down [E, H, I]; biases [E, 2 I], [E, H]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def reference(
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    weights: ExpertTensors,
    activation: Activation,
    *,
    of_inputs: bool = False,
) -> Tensor:
    """Return the mixture [T, H] in float64 of x [T, H]; experts and shares [T, k].

    of_inputs: shares multiply x, and not the results.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (numbers, parts) in enumerate(zip(experts.tolist(), shares.tolist(), strict=True)):
        for expert, share in zip(numbers, parts, strict=True):
            read = x[token].double() * (share if of_inputs else 1.0)
            both = F.linear(read, weights.gate_up[expert].double())
            if weights.gate_up_bias is not None:
                both = both + weights.gate_up_bias[expert].double()
            gated = activation.reference(*both.chunk(2))
            result = F.linear(gated, weights.down[expert].double())
            if weights.down_bias is not None:
                result = result + weights.down_bias[expert].double()
            out[token] += result if of_inputs else share * result
    return out


@triton.jit
def gated(acc, acc_up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return what the activation KIND makes of gate and up, float32."""
    if KIND == CLAMPED:
        acc = tl.minimum(acc, LIMIT)
        acc_up = tl.minimum(tl.maximum(acc_up, -LIMIT), LIMIT)
        acc = (acc_up + 1.0) * acc / (1.0 + tl.exp(-ALPHA * acc))
    else:
        acc = activate(acc, KIND) * acc_up
    return acc


@direct
@triton.jit
def _expert_kernel(
    p_x, p_w, p_bias, p_shares, p_out, p_order, p_tiles,
    x_stride, expert_stride, w_stride, out_stride, N, TOP,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr,
    SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KIND: the activation of a gated product, whose rows of up follow N rows of gate; 0: none.
    SHARES: of a gated product they multiply x, else the result. TOP: pairs of a row of x."""
    begin(PDL)
    p_tile = p_tiles + tl.program_id(1) * 3
    i_expert = tl.load(p_tile).to(tl.int64)
    if i_expert >= 0:
        first, count = tl.load(p_tile + 1), tl.load(p_tile + 2)
        i_m, i_k = tl.arange(0, BM), tl.arange(0, BK)
        b_n = tl.program_id(0) * BN + tl.arange(0, BN)
        b_in_m, b_in_n = i_m < count, b_n < N
        b_pair = tl.load(p_order + first + i_m, mask=b_in_m, other=0).to(tl.int64)
        p_rows = p_x + (b_pair // TOP)[:, None] * x_stride
        p_columns = p_w + i_expert * expert_stride + b_n.to(tl.int64)[None, :] * w_stride
        acc = tl.zeros([BM, BN], tl.float32)
        acc_up = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            b_at = start + i_k
            b_in_x, b_in_w = b_in_m[:, None], b_in_n[None, :]
            if not WHOLE:
                b_in_x = b_in_x & (b_at < K)[None, :]
                b_in_w = b_in_w & (b_at < K)[:, None]
            b_x = tl.load(p_rows + b_at[None, :], mask=b_in_x, other=0.0)
            b_w = tl.load(p_columns + b_at[:, None], mask=b_in_w, other=0.0)
            acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
            if KIND:
                p_up = p_columns + tl.cast(N, tl.int64) * w_stride
                b_up = tl.load(p_up + b_at[:, None], mask=b_in_w, other=0.0)
                acc_up = tl.dot(b_x, b_up, acc_up, input_precision="ieee")
        if SHARES:
            b_share = tl.load(p_shares + b_pair, mask=b_in_m, other=0.0)[:, None]
            if KIND:
                acc, acc_up = acc * b_share, acc_up * b_share
        if BIAS:
            p_row = p_bias + i_expert * (2 * N if KIND else N) + b_n
            acc += tl.load(p_row, mask=b_in_n, other=0.0).to(tl.float32)[None, :]
            if KIND:
                acc_up += tl.load(p_row + N, mask=b_in_n, other=0.0).to(tl.float32)[None, :]
        if KIND:
            acc = gated(acc, acc_up, KIND, LIMIT, ALPHA)
        elif SHARES:
            acc = acc * b_share
        p_to = p_out + b_pair[:, None] * out_stride + b_n[None, :]
        b_in = b_in_m[:, None] & b_in_n[None, :]
        tl.store(p_to, acc.to(p_out.dtype.element_ty), mask=b_in)


@direct
@triton.jit
def _combine_kernel(
    p_pairs, p_residual, p_out, residual_stride, out_stride, N,
    TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    b_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_n < N
    b_sum = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP):
        p_row = p_pairs + (i_token * TOP + place) * N + b_n
        b_sum += tl.load(p_row, mask=b_in, other=0.0).to(tl.float32)
    p_row = p_residual + i_token * residual_stride + b_n
    b_sum += tl.load(p_row, mask=b_in, other=0.0).to(tl.float32)
    p_to = p_out + i_token * out_stride + b_n
    tl.store(p_to, b_sum.to(p_out.dtype.element_ty), mask=b_in)


def tile_setting(
    dtype: torch.dtype, pairs: int, experts: int, *, fixed: bool
) -> tuple[int, int, int, int, int]:
    """Return BM, BN, BK, stages and warps for *pairs* pairs of tokens and *experts* experts."""
    if dtype == torch.float32:
        return WIDE_TILE
    if fixed:
        return FIXED_TILE
    return next(setting for most, setting in TILES if pairs <= most * experts)


def inner(
    x: Tensor,
    weights: ExpertTensors,
    order: Tensor,
    tiles: Tensor,
    setting: tuple[int, int, int, int, int],
    activation: Activation,
    *,
    out: Tensor,
    shares: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write act(gate) * up of every pair to *out* [T k, I], for x [T, H] of the weights' type.

    order, tiles: of ``moe_plan.plan`` with the setting's BM. shares: [T, k], that multiply x.
    """
    top = out.shape[0] // x.shape[0]
    weight, bias = weights.gate_up, weights.gate_up_bias
    _launch(x, weight, bias, shares, out, order, tiles, setting, activation, top=top, pdl=pdl)


def outer(
    x: Tensor,
    weights: ExpertTensors,
    shares: Tensor | None,
    order: Tensor,
    tiles: Tensor,
    setting: tuple[int, int, int, int, int],
    *,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Write share * down(x) of every pair to *out* [T k, H], for x [T k, I]; shares [T, k] or 1."""
    weight, bias = weights.down, weights.down_bias
    _launch(x, weight, bias, shares, out, order, tiles, setting, Activation(""), top=1, pdl=pdl)


def combine(pairs: Tensor, residual: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    """Write *residual* plus the sums of each token's pairs [T k, H] to *out* [T, H].

    *out* may be the residual; both are of any type.
    """
    tokens, width = out.shape
    assert pairs.is_contiguous() and pairs.shape[1] == width and residual.shape == out.shape
    assert residual.stride(1) == 1 and out.stride(1) == 1
    if not tokens:
        return
    block = min(COMBINE_BLOCK, power_of_two(width))
    _combine_kernel[(tokens, cdiv(width, block))](
        pairs, residual, out, residual.stride(0), out.stride(0), width,
        TOP=pairs.shape[0] // tokens, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shares: Tensor | None,
    out: Tensor,
    order: Tensor,
    tiles: Tensor,
    setting: tuple[int, int, int, int, int],
    activation: Activation,
    *,
    top: int,
    pdl: bool,
) -> None:
    (pairs, N), K, kind = out.shape, x.shape[1], activation.kind
    assert x.dtype == weight.dtype and order.shape == (pairs,)
    assert weight.shape[1:] == (2 * N if kind else N, K) and x.shape[0] * top == pairs
    assert all(t.stride(-1) == 1 for t in (x, weight, out)) and (
        bias is None or bias.stride(1) == 1
    )
    BM, BN, BK, stages, warps = setting
    BK = min(BK, max(16, power_of_two(K)))
    if not tiles.shape[0]:
        return
    _expert_kernel[(cdiv(N, BN), tiles.shape[0])](
        x, weight, bias, shares, out, order, tiles,
        x.stride(0), weight.stride(0), weight.stride(1), out.stride(0), N, top,
        K=K, BM=BM, BN=BN, BK=BK, WHOLE=K % BK == 0, KIND=kind, LIMIT=activation.limit,
        ALPHA=activation.alpha, BIAS=bias is not None, SHARES=shares is not None, PDL=pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
