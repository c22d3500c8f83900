"""Which experts each token goes to, and in which order that is computed: two launches a layer.

    pair     token * k + place: the place-th expert of a token
    order    all pairs, by expert; those of one expert in the order of the tokens
    tiles    at most BM pairs of one expert each: [expert, first in order, pairs]; expert -1: none

    order    | 3 8 | 0 4 9 5 6 | 1 2 7 |           experts 0, 2, 5 of the pairs of 5 tokens, k = 2
    tiles    [0 0 2] [2 2 4] [2 6 1] [5 7 3]       BM = 4

How many tiles there are depends on the router; how many there can be, on shapes alone
(``num_tiles``): so the products over tiles can be captured in a graph, and tiles that are left over
do nothing.

``route`` is one program a token. Its k experts are found one after another, so they are distinct
and in range whatever the logits are: NaN counts as least (rows of padding hold anything).

``plan`` is one program an expert. Each counts all pairs by expert, so it knows where its own begin,
and needs no other program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import direct, power_of_two

CHUNK = 2048  # pairs that a program of ``plan`` looks at together
MANY_WARPS = 512  # of which, from so many on, eight warps do
TILE_INTS = 3  # of a tile in the list


def reference(
    logits: Tensor, chosen: int, normalize: bool, sigmoid: bool = False
) -> tuple[Tensor, Tensor]:
    """Return shares float64 [T, k] and experts int64 [T, k] of router logits [T, E]."""
    if sigmoid:
        largest, experts = torch.topk(logits.double(), chosen, -1)
        return largest.sigmoid(), experts
    shares, experts = torch.topk(logits.double().softmax(-1), chosen, -1)
    return shares / shares.sum(-1, keepdim=True) if normalize else shares, experts


def num_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return how many tiles of *rows* pairs there are at most."""
    return min(pairs, pairs // rows + min(experts, pairs))


@direct
@triton.jit
def _route_kernel(
    p_logits, p_experts, p_shares, stride,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    i_e, i_k = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    b_x = tl.load(p_logits + i_token * stride + i_e, mask=i_e < E, other=0.0)
    b_x = tl.where(b_x == b_x, tl.minimum(tl.maximum(b_x, -1e30), 1e30), -1e30)
    b_left = tl.where(i_e < E, b_x, -2e30)
    if SIGMOID:
        b_exp = 1.0 / (1.0 + tl.exp(-b_x))
    else:
        b_exp = tl.where(i_e < E, tl.exp(b_x - tl.max(b_left, 0)), 0.0)
    b_experts = tl.zeros([K_PAD], tl.int32)
    b_shares = tl.zeros([K_PAD], tl.float32)
    for place in tl.static_range(K):
        expert = tl.min(tl.where(b_left == tl.max(b_left, 0), i_e, E_PAD), 0)
        share = tl.sum(tl.where(i_e == expert, b_exp, 0.0), 0)
        b_experts = tl.where(i_k == place, expert, b_experts)
        b_shares = tl.where(i_k == place, share, b_shares)
        b_left = tl.where(i_e == expert, -3e30, b_left)
    if NORMALIZE:
        b_shares = b_shares / tl.sum(b_shares, 0)
    elif not SIGMOID:
        b_shares = b_shares / tl.sum(b_exp, 0)
    tl.store(p_experts + i_token * K + i_k, b_experts, mask=i_k < K)
    tl.store(p_shares + i_token * K + i_k, b_shares, mask=i_k < K)


@direct
@triton.jit(do_not_specialize=["pairs", "num_tiles"])
def _plan_kernel(
    p_experts, p_order, p_tiles, pairs, num_tiles,
    E: tl.constexpr, E_PAD: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program E, which has no expert, marks the tiles that are left over."""
    begin(PDL)
    i_expert = tl.program_id(0)
    i_e, i_c = tl.arange(0, E_PAD), tl.arange(0, CHUNK)
    b_counts = tl.zeros([E_PAD], tl.int32)
    for start in range(0, pairs, CHUNK):
        b_id = tl.load(p_experts + start + i_c, mask=start + i_c < pairs, other=E)
        b_counts += tl.histogram(b_id, E_PAD)  # number E is of none
    b_before = i_e < i_expert
    first = tl.sum(tl.where(b_before, b_counts, 0), 0)
    tile = tl.sum(tl.where(b_before, (b_counts + BM - 1) // BM, 0), 0)
    if i_expert == E:
        for at in range(tile, num_tiles, CHUNK):
            tl.store(p_tiles + (at + i_c) * 3, -1, mask=at + i_c < num_tiles)
    else:
        mine = tl.sum(tl.where(i_e == i_expert, b_counts, 0), 0)
        for at in range(0, mine, BM * CHUNK):
            b_at = at + i_c * BM
            p_tile, b_in = p_tiles + (tile + b_at // BM) * 3, b_at < mine
            tl.store(p_tile, i_expert, mask=b_in)
            tl.store(p_tile + 1, first + b_at, mask=b_in)
            tl.store(p_tile + 2, tl.minimum(mine - b_at, BM), mask=b_in)
        for start in range(0, pairs, CHUNK):
            b_id = tl.load(p_experts + start + i_c, mask=start + i_c < pairs, other=E_PAD)
            b_hit = b_id == i_expert
            b_rank = tl.cumsum(b_hit.to(tl.int32), 0)
            tl.store(p_order + first + b_rank - 1, start + i_c, mask=b_hit)
            first += tl.sum(b_hit.to(tl.int32), 0)


def route(
    logits: Tensor,
    *,
    normalize: bool,
    experts: Tensor,
    shares: Tensor,
    sigmoid: bool = False,
    pdl: bool = False,
) -> None:
    """Write *experts* int32 [T, k] and *shares* float32 [T, k] for logits float32 [T, E].

    The k experts of the largest logits, the largest first, and what a softmax over all logits gives
    them, with *normalize* divided by their sum; with *sigmoid* those of their logits. *pdl*: see
    ``zlm.kernels.chain``.
    """
    (tokens, chosen), count = experts.shape, logits.shape[1]
    assert logits.shape[0] == tokens and shares.shape == experts.shape and chosen <= count
    assert logits.stride(1) == 1 and experts.is_contiguous() and shares.is_contiguous()
    if tokens:
        _route_kernel[(tokens,)](
            logits, experts, shares, logits.stride(0), E=count,
            E_PAD=power_of_two(count), K=chosen, K_PAD=power_of_two(chosen),
            NORMALIZE=normalize and not sigmoid, SIGMOID=sigmoid, PDL=pdl, num_warps=1,
            launch_pdl=pdl,
        )  # fmt: skip


def plan(
    experts: Tensor, count: int, rows: int, *, order: Tensor, tiles: Tensor, pdl: bool = False
) -> None:
    """Write *order* int32 [T k] and *tiles* int32 [``num_tiles``, 3] for experts int32 [T, k].

    count: experts that there are; rows: BM, pairs of a tile at most, a power of two.
    """
    pairs = experts.numel()
    assert order.shape == (pairs,) and experts.is_contiguous() and tiles.is_contiguous()
    assert tiles.shape == (num_tiles(pairs, count, rows), TILE_INTS)
    if pairs:
        chunk = min(CHUNK, max(16, power_of_two(pairs)))
        _plan_kernel[(count + 1,)](
            experts, order, tiles, pairs, tiles.shape[0], E=count,
            E_PAD=power_of_two(count + 1), BM=rows, CHUNK=chunk, PDL=pdl,
            num_warps=4 if chunk < MANY_WARPS else 8, launch_pdl=pdl,
        )  # fmt: skip
