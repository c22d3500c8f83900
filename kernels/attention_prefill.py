"""Paged attention of rows of many tokens: chunks of prompts, with cached prefixes and windows.

The keys and values of the chunk itself are in the cache already (``rotary_kv``), so that a whole
prompt, a later chunk and a few tokens to verify are one case: row r's queries are the last
``query_starts[r + 1] - query_starts[r]`` of its ``seq_lens[r]`` tokens.

A *tile* is BLOCK_Q queries of one row times the G = Hq / Hkv query heads of one KV head, packed to
BLOCK_M = BLOCK_Q * G rows (rounded down to whole queries): keys are read once for all heads that
share them, and little is computed in vain where a chunk is short or crosses the diagonal.

Which tiles there are, heavy ones first, tells a plan (``zlm.kernels.attention_prefill_plan``).

A program goes over the keys of its tile in up to three loops, of which the long one needs no mask:

    keys      0 ........ |first seen          all queries see these          |  diagonal  |
    loop                 |  masked (window)   |           unmasked           |   masked   |

With FIXED all of it is one masked loop: which of the three a key falls in depends on the tile, and
a compiler may round the same expression differently in each. Keys come in steps that are aligned in
the sequence, and one that a query sees nothing of leaves its sums as they are: so then a query's
result has the same bits whatever tile it is in, and whether its prompt came in one chunk or many.

Of a cache of e4m3 a tile widens what it reads, or reads what ``zlm.kernels.kv_widen`` has widened
for its row: a step that has both kinds of rows launches the kernel twice.

The layout of the cache is told in ``zlm.kernels.attention_decode``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.attention_decode_plan import first_seen
from zlm.kernels.attention_prefill_plan import PrefillConfig, config_of
from zlm.kernels.chain import begin
from zlm.kernels.kv_fp8 import (
    FP8,
    PLAIN,
    dequantized,
    even,
    half_of_query,
    halves_of_query,
    odd,
    reading,
)
from zlm.kernels.launch import direct, power_of_two
from zlm.kernels.rotary_kv import turned

from zlm import config as facts

LOG2_E = 1.4426950408889634
LOG2_E_CONSTANT = tl.constexpr(LOG2_E)  # for kernels
ALL_ROWS, ROWS_OF_CACHE, WIDENED_ROWS = 0, 1, 2  # that a launch is for: the kernel's ROWS


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
    kv_scales: Tensor | None = None,
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
        kv = dequantized(cache, blocks, kv_scales)[:, :, :length]
        queries = q[first:last].double().unflatten(1, (num_kv_heads, -1))  # [n, Hkv, G, D]
        scores = torch.einsum("nhgd,hsd->hgns", queries, kv[0]) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        key = torch.arange(length, device=q.device)
        position = torch.arange(length - (last - first), length, device=q.device)[:, None]
        hidden = key > position
        if window:
            hidden |= key < facts.first_seen(position, window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.double().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("hgns,hsd->nhgd", weights, kv[1]).flatten(1, 2)
    return out


@triton.jit
def _block_of(p_row, i_key, i_len, BLOCK_SIZE: tl.constexpr, DENSE: tl.constexpr):
    """Return the blocks of keys *i_key*: of a table's row, or, DENSE, counted from the first."""
    if DENSE:
        b_block = p_row + i_key // BLOCK_SIZE
    else:
        b_block = tl.load(p_row + i_key // BLOCK_SIZE, mask=i_key < i_len, other=0)
    return b_block


@triton.jit
def _key_loop(
    b_q,
    b_q_odd,
    b_acc,
    b_odd,
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
    READ: tl.constexpr,
    DENSE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to keys i_begin .. i_end, multiples of BLOCK_N.

    Return (acc, its odd dimensions if those are apart, maxima, sums). D is of what the cache has;
    p_row is a number with DENSE, see ``_block_of``.
    """
    i_d = tl.arange(0, D_PAD)
    i_n = tl.arange(0, BLOCK_N)
    i_token = (i_n % BLOCK_SIZE)[:, None] * D + i_d[None, :]  # where a token is in its block
    # Blocks are looked up a step ahead: keys and values are then asked for without waiting.
    i_key = i_begin + i_n
    b_block = _block_of(p_row, i_key, i_len, BLOCK_SIZE, DENSE)
    for i_base in range(i_begin, i_end, BLOCK_N):
        i_key = i_base + i_n
        i_next = i_key + BLOCK_N
        b_next = _block_of(p_row, i_next, i_len, BLOCK_SIZE, DENSE)
        if BLOCK_N % BLOCK_SIZE:  # a step may begin within a block
            i_token = (i_key % BLOCK_SIZE)[:, None] * D + i_d[None, :]
        p_tile = p_k + b_block.to(tl.int64)[:, None] * stride_block + i_token
        if MASKED or D != D_PAD:
            mask = (i_key < i_len)[:, None] & (i_d < D)[None, :]
            b_k = tl.load(p_tile, mask=mask, other=0)
            b_v = tl.load(p_tile + BLOCK_SIZE * D, mask=mask, other=0)
        else:
            b_k = tl.load(p_tile)
            b_v = tl.load(p_tile + BLOCK_SIZE * D)
        b_block = b_next
        if READ == 0:
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        else:
            b_s = tl.dot(b_q, tl.trans(even(b_k, b_q, READ)), input_precision="ieee")
            b_s = tl.dot(b_q_odd, tl.trans(odd(b_k, b_q, READ)), b_s, input_precision="ieee")
        if SOFTCAP:
            b_s = cap * (1.0 - 2.0 / (tl.exp2(b_s * scale) + 1.0))
        if MASKED:
            seen = i_key[None, :] <= i_position[:, None]
            if WINDOW != 0:
                seen = seen & (i_key[None, :] >= first_seen(i_position, WINDOW)[:, None])
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
        if READ == 0:
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        else:
            b_p = b_p.to(b_q.dtype)
            b_acc = tl.dot(b_p, even(b_v, b_q, READ), b_acc, input_precision="ieee")
            b_odd = b_odd * b_alpha[:, None]
            b_odd = tl.dot(b_p, odd(b_v, b_q, READ), b_odd, input_precision="ieee")
        b_m = b_new
    return b_acc, b_odd, b_m, b_l


@direct
@triton.jit(
    do_not_specialize=["p_table", "p_starts", "p_lens", "p_work", "p_bases", "stride_table"]
)
def _prefill_kernel(
    p_q,
    p_cache,
    p_table,
    p_starts,
    p_lens,
    p_work,
    p_out,
    p_sinks,
    p_kv_scales,
    p_bases,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    scale,
    cap,
    v_factor,
    p_turns,
    num_positions,
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
    READ: tl.constexpr,
    KV_SCALES: tl.constexpr,
    ROT: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROT: elements of a head that are to be rotated, 0: q is rotated."""
    DENSE: tl.constexpr = ROWS == 2
    begin(PDL)
    i_head = tl.program_id(0)
    i_item = tl.program_id(1)
    i_row = tl.load(p_work + i_item * 2)
    i_tile = tl.load(p_work + i_item * 2 + 1)
    if i_row < 0:
        return
    p_row = p_table + i_row.to(tl.int64) * stride_table
    if ROWS != 0:
        i_base = tl.load(p_bases + i_row)
        if (i_base >= 0) != DENSE:
            return
        if DENSE:
            p_row = i_base
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
    if ROT > 0:
        i_turn = tl.minimum(i_position, num_positions - 1)
        p_turn = p_turns + i_turn[:, None] * ROT + i_d[None, :]
        b_turn = tl.load(p_turn, mask=(i_d < ROT)[None, :], other=0.0)
        b_wide = turned(b_q.to(tl.float32), b_turn, BLOCK_M, BLOCK_M, D_PAD, ROT)
        b_q = b_wide.to(b_q.dtype)
    b_q_odd = b_q
    if READ != 0:
        b_q, b_q_odd = halves_of_query(b_q)
    if DENSE:
        b_q = half_of_query(b_q)
    if KV_SCALES:
        scale *= tl.load(p_kv_scales + i_head)
        v_factor *= tl.load(p_kv_scales + tl.num_programs(0) + i_head)

    i_low = 0
    i_window_end = 0
    i_diagonal = (i_first + 1) // BLOCK_N * BLOCK_N
    if WINDOW != 0:
        i_low = first_seen(i_first, WINDOW) // BLOCK_N * BLOCK_N
        i_window_end = (first_seen(i_last, WINDOW) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        i_window_end = tl.maximum(i_window_end, i_low)
        i_diagonal = tl.maximum(i_diagonal, i_low)
        i_window_end = tl.minimum(i_window_end, i_diagonal)
    if FIXED:
        i_diagonal = i_low

    p_k = p_cache + i_head.to(tl.int64) * stride_head
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    PAIR: tl.constexpr = 1 if READ == 0 else 2
    b_acc = tl.zeros([BLOCK_M, D_PAD // PAIR], tl.float32)
    b_odd = b_acc if READ != 0 else 0.0
    if SINKS:  # as if a key without a value had been seen
        b_m = tl.load(p_sinks + i_q_head) * LOG2_E_CONSTANT
        b_l += 1.0
    # fmt: off
    if WINDOW != 0 and not FIXED:
        b_acc, b_odd, b_m, b_l = _key_loop(
            b_q, b_q_odd, b_acc, b_odd, b_m, b_l, p_row, p_k, stride_block, i_low, i_window_end,
            i_position, i_len, scale, cap, D // PAIR, D_PAD // PAIR, BLOCK_N, BLOCK_SIZE, WINDOW,
            SOFTCAP, READ, DENSE, True,
        )
    if not FIXED:
        b_acc, b_odd, b_m, b_l = _key_loop(
            b_q, b_q_odd, b_acc, b_odd, b_m, b_l, p_row, p_k, stride_block, i_window_end,
            i_diagonal, i_position, i_len, scale, cap, D // PAIR, D_PAD // PAIR, BLOCK_N,
            BLOCK_SIZE, WINDOW, SOFTCAP, READ, DENSE, False,
        )
    b_acc, b_odd, b_m, b_l = _key_loop(
        b_q, b_q_odd, b_acc, b_odd, b_m, b_l, p_row, p_k, stride_block, i_diagonal, i_last + 1,
        i_position, i_len, scale, cap, D // PAIR, D_PAD // PAIR, BLOCK_N, BLOCK_SIZE, WINDOW,
        SOFTCAP, READ, DENSE, True,
    )
    # fmt: on
    if READ != 0:
        b_acc = tl.reshape(tl.join(b_acc, b_odd) * v_factor, (BLOCK_M, D_PAD))
    if DENSE:
        b_acc = b_acc * v_factor
    b_result = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    p_rows = p_out + (i_token * stride_out_token + i_q_head * stride_out_head)[:, None]
    tl.store(p_rows + i_d[None, :], b_result.to(p_out.dtype.element_ty), mask=mask)


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
    kv_scales: Tensor | None = None,
    turns: Tensor | None = None,
    fixed: bool = False,
    bases: Tensor | None = None,
    widened: Tensor | None = None,
    pdl: bool = False,
    config: PrefillConfig | None = None,
) -> None:
    """Write to *out* [T, Hq, D] the causal attention of q [T, Hq, D] over the paged cache.

    cache: [num_blocks, Hkv, 2, block_size, D] in the type of q, or e4m3 with *kv_scales* float32
    [2, Hkv] (None: 1); the keys and values of these tokens are in it. block_table: int32 [R, B];
    query_starts: int32 [R + 1], offsets in q (the first need not be 0); seq_lens: int32 [R]; plan:
    ``plan_prefill`` of the same. A query sees the last *window* tokens up to itself (0: all;
    -n: those of its chunk of n).
    Tokens of no row are not written. *sinks*: float32 [Hq], a score of each head that takes its
    share of the softmax and gives nothing. *turns*: complex64 [positions, rot / 2], contiguous, by
    which queries are still to be rotated (None: they are). *fixed*: a query's bits do not depend on
    the chunk and the tile that it is in. *bases*: int32 [R], of ``zlm.kernels.kv_widen``: rows that
    are not widened alone; with *widened*, float16 [C, Hkv, 2, block_size, D], those that are alone,
    and q is of 2 bytes. *pdl*: see ``zlm.kernels.chain``. *config* (None: the tuned one) must be
    that of the plan's ``queries``. Needs ``tl.dot`` (sm80 on).
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    assert q.dtype == cache.dtype or cache.dtype == FP8
    assert cache.stride()[2:] == (block_size * head_dim, head_dim, 1)
    assert q.stride(2) == 1 and out.stride(2) == 1 and out.shape == q.shape
    if not plan.shape[0]:
        return
    cache, read_as, factor = reading(cache)
    is_narrow, rows = read_as != PLAIN, ALL_ROWS if bases is None else ROWS_OF_CACHE
    if widened is not None:
        assert is_narrow and bases is not None and q.dtype.itemsize == 2
        cache, read_as, rows = widened, PLAIN, WIDENED_ROWS
    config = config or config_of(q.device, head_dim, q.dtype, reads_pairs=read_as != PLAIN)
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
        kv_scales if is_narrow else None,
        bases,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        # With a soft cap the exponential is that of tanh: exp(2 score / cap).
        (2.0 * scale / softcap if softcap else scale) * LOG2_E * factor,
        softcap * LOG2_E,
        factor,
        None if turns is None else torch.view_as_real(turns),
        1 if turns is None else turns.shape[0],
        G=group,
        D=head_dim,
        D_PAD=max(power_of_two(head_dim), 32 if read_as else 16),
        BLOCK_M=max(config.block_m, power_of_two(group)),
        BLOCK_Q=max(config.block_m // group, 1),
        BLOCK_N=config.block_n,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        FIXED=fixed,
        SINKS=sinks is not None,
        READ=read_as,
        KV_SCALES=kv_scales is not None and is_narrow,
        ROT=0 if turns is None else 2 * turns.shape[1],
        ROWS=rows,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
        launch_pdl=pdl,
    )
