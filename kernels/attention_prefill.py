"""Paged attention of rows of many tokens: chunks of prompts, with cached prefixes and windows.

The keys and values of the chunk itself are in the cache already (``rotary_kv``), so that a whole
prompt, a later chunk and a few tokens to verify are one case: row r's queries are the last
``query_starts[r + 1] - query_starts[r]`` of its ``seq_lens[r]`` tokens.

A *tile* is BLOCK_Q queries of one row times the G = Hq / Hkv query heads of one KV head, packed to
BLOCK_M = BLOCK_Q * G rows (rounded down to whole queries): keys are read once for all heads that
share them, and little is computed in vain where a chunk is short or crosses the diagonal.

``plan_prefill`` lists the (row, tile) of a step on the device, *heavy tiles first*: the last tiles
of a long prompt see the most keys, and if they came last the card would wait for them. A tile's
weight is the number of keys that it sees, at most window + BLOCK_Q. Weights grow along a row, so a
tile's rank in the list is a sum over rows of a closed form, and nothing has to be sorted. All
layers of a KV group use the list.

A program goes over the keys of its tile in up to three loops, of which the long one needs no mask:

    keys      0 ........ |first seen          all queries see these          |  diagonal  |
    loop                 |  masked (window)   |           unmasked           |   masked   |

With FIXED all of it is one masked loop: which of the three a key falls in depends on the tile, and
a compiler may round the same expression differently in each. Keys come in steps that are aligned in
the sequence, and one that a query sees nothing of leaves its sums as they are: so then a query's
result has the same bits whatever tile it is in, and whether its prompt came in one chunk or many.

The layout of the cache is told in ``zlm.kernels.attention_decode``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin

LOG2_E = 1.4426950408889634
LOG2_E_CONSTANT = tl.constexpr(LOG2_E)  # for kernels
PLAN_ITEMS = 16  # tiles ranked by one program of the plan kernel
PLAN_ROWS = 128  # rows it looks at at once


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel runs on a card."""

    block_m: int  # packed query rows of a tile
    block_n: int  # keys of a step
    warps: int
    stages: int
    programs: int = 1  # that run on a multiprocessor at once

    @property
    def registers(self) -> int:
        """What a thread may have for so many programs to run at once."""
        return min(65_536 // (self.programs * self.warps * 32) // 8 * 8, 255)


# By padded head_dim, for elements of 2 bytes. Measured on an H200 (not 32): ``bench/attention.py``.
# With n stages keys and values come n - 1 steps ahead and have n buffers (seen in the compiled code
# of Triton 3.6).
CONFIGS: dict[str, dict[int, PrefillConfig]] = {
    "NVIDIA H200": {
        32: PrefillConfig(64, 64, 4, 3, 3),
        64: PrefillConfig(64, 64, 4, 3, 3),
        128: PrefillConfig(128, 64, 8, 3),
        256: PrefillConfig(128, 32, 8, 3),
        512: PrefillConfig(64, 32, 8, 2),  # not measured
    },
}
DEFAULT_CONFIGS = {
    32: PrefillConfig(64, 64, 4, 2),
    64: PrefillConfig(64, 64, 4, 2),
    128: PrefillConfig(64, 32, 4, 2),
    256: PrefillConfig(64, 16, 4, 2),
    512: PrefillConfig(32, 16, 4, 1),
}
WIDE_CONFIG = PrefillConfig(32, 16, 4, 1)  # for float32: exact products, no tensor cores


def reference(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [T, Hq, D] in float64 of the same arguments; tokens of no row are zero."""
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    starts = query_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        blocks = block_table[row, : -(-length // block_size)].long()
        kv = cache[blocks].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length].double()
        queries = q[first:last].double().unflatten(1, (num_kv_heads, -1))  # [n, Hkv, G, D]
        scores = torch.einsum("nhgd,hsd->hgns", queries, kv[0]) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        key = torch.arange(length, device=q.device)
        position = torch.arange(length - (last - first), length, device=q.device)[:, None]
        hidden = key > position
        if window:
            hidden |= key <= position - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.double().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("hgns,hsd->nhgd", weights, kv[1]).flatten(1, 2)
    return out


@triton.jit
def _heavier(i_weight, i_tiles, i_start, i_len, BLOCK_Q: tl.constexpr, CAP: tl.constexpr):
    """Return how many tiles of a row weigh more than *i_weight*.

    Tile j weighs the position after its last query, at most CAP (0: no limit).
    """
    n_not = tl.minimum(tl.maximum(i_weight - i_start, 0) // BLOCK_Q, i_tiles)
    n_more = tl.where(i_weight >= i_len, 0, i_tiles - n_not)
    if CAP > 0:
        n_more = tl.where(i_weight >= CAP, 0, n_more)
    return n_more


@triton.jit(do_not_specialize=["p_starts", "p_lens", "p_work", "num_rows", "num_items"])
def _plan_kernel(
    p_starts,
    p_lens,
    p_work,
    num_rows,
    num_items,
    BLOCK_Q: tl.constexpr,
    CAP: tl.constexpr,
    ITEMS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank ITEMS tiles and write each as (row, tile) at its rank; row -1 where there is none."""
    begin(PDL)
    i_item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    # Which row: the number of rows whose tiles all come before.
    b_row = tl.zeros([ITEMS], tl.int32)
    b_before = tl.zeros([ITEMS], tl.int32)
    total = 0
    for i_base in range(0, num_rows, ROWS):
        i_row = i_base + tl.arange(0, ROWS)
        in_rows = i_row < num_rows
        i_from = tl.load(p_starts + i_row, mask=in_rows, other=0)
        i_to = tl.load(p_starts + i_row + 1, mask=in_rows, other=0)
        i_tiles = (i_to - i_from + BLOCK_Q - 1) // BLOCK_Q
        b_end = total + tl.cumsum(i_tiles, 0)
        before = (b_end[None, :] <= i_item[:, None]) & in_rows[None, :]
        b_row += tl.sum(before.to(tl.int32), 1)
        b_before = tl.maximum(b_before, tl.max(tl.where(before, b_end[None, :], 0), 1))
        total += tl.sum(i_tiles, 0)
    exists = i_item < total
    b_tile = i_item - b_before
    b_queries = tl.load(p_starts + b_row + 1, mask=exists, other=0)
    b_queries -= tl.load(p_starts + b_row, mask=exists, other=0)
    b_len = tl.load(p_lens + b_row, mask=exists, other=0)
    b_weight = tl.minimum(b_len - b_queries + (b_tile + 1) * BLOCK_Q, b_len)
    if CAP > 0:
        b_weight = tl.minimum(b_weight, CAP)

    # Before it come all that are heavier, and its equals in earlier rows or earlier in its own.
    b_rank = tl.zeros([ITEMS], tl.int32)
    for i_base in range(0, num_rows, ROWS):
        i_row = i_base + tl.arange(0, ROWS)
        in_rows = i_row < num_rows
        i_from = tl.load(p_starts + i_row, mask=in_rows, other=0)
        i_to = tl.load(p_starts + i_row + 1, mask=in_rows, other=0)
        i_len = tl.load(p_lens + i_row, mask=in_rows, other=0)
        i_tiles = ((i_to - i_from + BLOCK_Q - 1) // BLOCK_Q)[None, :]
        i_start = (i_len - (i_to - i_from))[None, :]
        n_more = _heavier(b_weight[:, None], i_tiles, i_start, i_len[None, :], BLOCK_Q, CAP)
        n_least = _heavier(b_weight[:, None] - 1, i_tiles, i_start, i_len[None, :], BLOCK_Q, CAP)
        n_equal = n_least - n_more
        is_own = i_row[None, :] == b_row[:, None]
        is_earlier = i_row[None, :] < b_row[:, None]
        # Equals of one row are its last but for the heavier, so the first equal is tile
        # i_tiles - n_least.
        n_own = b_tile[:, None] - (i_tiles - n_least)
        b_rank += tl.sum(n_more + tl.where(is_earlier, n_equal, tl.where(is_own, n_own, 0)), 1)
    b_rank = tl.where(exists, b_rank, i_item)
    p_item = p_work + b_rank * 2
    listed = i_item < num_items
    tl.store(p_item, tl.where(exists, b_row, -1), mask=listed)
    tl.store(p_item + 1, tl.where(exists, b_tile, 0), mask=listed)


@triton.jit
def _key_loop(
    b_q,
    b_acc,
    b_m,
    b_l,
    p_row,
    p_k,
    stride_block,
    i_begin,
    i_end,
    i_position,
    i_len,
    scale,
    cap,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to keys i_begin .. i_end, multiples of BLOCK_N; return (acc, maxima, sums)."""
    i_d = tl.arange(0, D_PAD)
    i_n = tl.arange(0, BLOCK_N)
    i_token = (i_n % BLOCK_SIZE)[:, None] * D + i_d[None, :]  # where a token is in its block
    # Blocks are looked up a step ahead: keys and values are then asked for without waiting.
    i_key = i_begin + i_n
    b_block = tl.load(p_row + i_key // BLOCK_SIZE, mask=i_key < i_len, other=0)
    for i_base in range(i_begin, i_end, BLOCK_N):
        i_key = i_base + i_n
        i_next = i_key + BLOCK_N
        b_next = tl.load(p_row + i_next // BLOCK_SIZE, mask=i_next < i_len, other=0)
        if BLOCK_N % BLOCK_SIZE:  # a step may begin within a block
            i_token = (i_key % BLOCK_SIZE)[:, None] * D + i_d[None, :]
        p_tile = p_k + b_block.to(tl.int64)[:, None] * stride_block + i_token
        if MASKED or D != D_PAD:
            mask = (i_key < i_len)[:, None] & (i_d < D)[None, :]
            b_k = tl.load(p_tile, mask=mask, other=0.0)
            b_v = tl.load(p_tile + BLOCK_SIZE * D, mask=mask, other=0.0)
        else:
            b_k = tl.load(p_tile)
            b_v = tl.load(p_tile + BLOCK_SIZE * D)
        b_block = b_next
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if SOFTCAP:
            b_s = cap * (1.0 - 2.0 / (tl.exp2(b_s * scale) + 1.0))
        if MASKED:
            seen = i_key[None, :] <= i_position[:, None]
            if WINDOW > 0:
                seen = seen & (i_key[None, :] > i_position[:, None] - WINDOW)
            b_s = tl.where(seen, b_s, float("-inf"))
        # The scale, which is positive, is left to the exponent's fused multiply-add.
        factor = 1.0 if SOFTCAP else scale
        b_new = tl.maximum(b_m, tl.max(b_s, 1) * factor)
        b_shift = b_new
        if MASKED:  # a query may have seen nothing yet
            b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_alpha = tl.exp2(b_m - b_shift)
        b_p = tl.exp2(b_s * factor - b_shift[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        b_m = b_new
    return b_acc, b_m, b_l


@triton.jit(do_not_specialize=["p_table", "p_starts", "p_lens", "p_work", "stride_table"])
def _prefill_kernel(
    p_q,
    p_cache,
    p_table,
    p_starts,
    p_lens,
    p_work,
    p_out,
    p_sinks,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    scale,
    cap,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FIXED: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i_head = tl.program_id(0)
    i_item = tl.program_id(1)
    i_row = tl.load(p_work + i_item * 2)
    i_tile = tl.load(p_work + i_item * 2 + 1)
    if i_row < 0:
        return
    i_from = tl.load(p_starts + i_row)
    n_queries = tl.load(p_starts + i_row + 1) - i_from
    i_len = tl.load(p_lens + i_row)
    i_query0 = i_tile * BLOCK_Q
    n_now = tl.minimum(n_queries - i_query0, BLOCK_Q)
    i_first = i_len - n_queries + i_query0  # position of the tile's first query
    i_last = i_first + n_now - 1

    i_m = tl.arange(0, BLOCK_M)
    i_d = tl.arange(0, D_PAD)
    i_query = i_m // G
    mask = (i_query < n_now)[:, None] & (i_d < D)[None, :]
    i_token = (i_from + i_query0 + i_query).to(tl.int64)
    i_q_head = i_head * G + i_m % G
    p_rows = p_q + (i_token * stride_q_token + i_q_head * stride_q_head)[:, None]
    b_q = tl.load(p_rows + i_d[None, :], mask=mask, other=0.0)
    # Rows of padding stand where the last query does: they see something, and are not stored.
    i_position = tl.minimum(i_first + i_query, i_last)

    i_low = 0
    i_window_end = 0
    i_diagonal = (i_first + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        i_low = tl.maximum(i_first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        i_window_end = tl.maximum(i_last + BLOCK_N - WINDOW, 0) // BLOCK_N * BLOCK_N
        i_window_end = tl.maximum(i_window_end, i_low)
        i_diagonal = tl.maximum(i_diagonal, i_low)
        i_window_end = tl.minimum(i_window_end, i_diagonal)
    if FIXED:
        i_diagonal = i_low

    p_row = p_table + i_row.to(tl.int64) * stride_table
    p_k = p_cache + i_head.to(tl.int64) * stride_head
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if SINKS:  # as if a key without a value had been seen
        b_m = tl.load(p_sinks + i_q_head) * LOG2_E_CONSTANT
        b_l += 1.0
    # fmt: off
    if WINDOW > 0 and not FIXED:
        b_acc, b_m, b_l = _key_loop(
            b_q, b_acc, b_m, b_l, p_row, p_k, stride_block, i_low, i_window_end,
            i_position, i_len, scale, cap, D, D_PAD, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, True,
        )
    if not FIXED:
        b_acc, b_m, b_l = _key_loop(
            b_q, b_acc, b_m, b_l, p_row, p_k, stride_block, i_window_end, i_diagonal,
            i_position, i_len, scale, cap, D, D_PAD, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, False,
        )
    b_acc, b_m, b_l = _key_loop(
        b_q, b_acc, b_m, b_l, p_row, p_k, stride_block, i_diagonal, i_last + 1,
        i_position, i_len, scale, cap, D, D_PAD, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, True,
    )
    # fmt: on
    b_result = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    p_rows = p_out + (i_token * stride_out_token + i_q_head * stride_out_head)[:, None]
    tl.store(p_rows + i_d[None, :], b_result.to(p_out.dtype.element_ty), mask=mask)


def num_tiles(num_tokens: int, num_rows: int, queries: int) -> int:
    """Return the most tiles of *queries* queries that rows with *num_tokens* in all can have."""
    return (num_tokens - num_rows) // queries + num_rows if num_tokens > num_rows else num_tokens


def tile_queries(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    config: PrefillConfig | None = None,
) -> int:
    """Return the queries of a tile for this geometry: the plan's ``queries``."""
    block_m = (config or _config(device, head_dim, dtype)).block_m
    return max(block_m // (num_heads // num_kv_heads), 1)


def plan_prefill(
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    out: Tensor,
    queries: int,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Write to *out* (int32 [items, 2]) the tiles of a step, heavy ones first, as (row, tile).

    query_starts: int32 [R + 1], offsets among the step's tokens; seq_lens: int32 [R]. *out* must
    have ``num_tiles`` items or more; those past the last tile get row -1. The list serves every
    layer with this window and geometry. *pdl*: see ``zlm.kernels.chain``.
    """
    assert out.dtype == torch.int32 and out.is_contiguous() and out.shape[1] == 2
    rows, items = seq_lens.shape[0], out.shape[0]
    _plan_kernel[(triton.cdiv(items, PLAN_ITEMS),)](
        query_starts,
        seq_lens,
        out,
        rows,
        items,
        BLOCK_Q=queries,
        CAP=window + queries if window else 0,
        ITEMS=PLAN_ITEMS,
        ROWS=PLAN_ROWS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def attention_prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    plan: Tensor,
    *,
    out: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fixed: bool = False,
    pdl: bool = False,
    config: PrefillConfig | None = None,
) -> None:
    """Write to *out* [T, Hq, D] the causal attention of q [T, Hq, D] over the paged cache.

    cache: [num_blocks, Hkv, 2, block_size, D] in the type of q, with the keys and values of these
    tokens. block_table: int32 [R, B]; query_starts: int32 [R + 1], offsets in q (the first need not
    be 0); seq_lens: int32 [R]; plan: ``plan_prefill`` of the same. A query sees the last *window*
    tokens up to itself (0: all). Tokens of no row are not written. *sinks*: float32 [Hq], a score
    of each head that takes its share of the softmax and gives nothing. *fixed*: a query's bits do
    not depend on the chunk and the tile that it is in. *pdl*: see ``zlm.kernels.chain``. *config*
    (None: the tuned one) must be that of the plan's ``queries``. Needs ``tl.dot`` (sm80 on).
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    assert q.dtype == cache.dtype and cache.stride()[2:] == (block_size * head_dim, head_dim, 1)
    assert q.stride(2) == 1 and out.stride(2) == 1 and out.shape == q.shape
    if not plan.shape[0]:
        return
    config = config or _config(q.device, head_dim, q.dtype)
    group = num_heads // num_kv_heads
    _prefill_kernel[(num_kv_heads, plan.shape[0])](
        q,
        cache,
        block_table,
        query_starts,
        seq_lens,
        plan,
        out,
        sinks,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        # With a soft cap the exponential is that of tanh: exp(2 score / cap).
        (2.0 * scale / softcap if softcap else scale) * LOG2_E,
        softcap * LOG2_E,
        G=group,
        D=head_dim,
        D_PAD=max(triton.next_power_of_2(head_dim), 16),
        BLOCK_M=max(config.block_m, triton.next_power_of_2(group)),
        BLOCK_Q=max(config.block_m // group, 1),
        BLOCK_N=config.block_n,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        FIXED=fixed,
        SINKS=sinks is not None,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
        launch_pdl=pdl,
    )


def _config(device: torch.device, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    if dtype.itemsize > 2:
        return WIDE_CONFIG
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return CONFIGS.get(name, DEFAULT_CONFIGS)[max(triton.next_power_of_2(head_dim), 32)]
