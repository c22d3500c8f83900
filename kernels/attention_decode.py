"""Paged attention of one query token a row: split-KV over a balanced list of work.

The layout of the KV cache on a GPU
-----------------------------------
    cache of a layer   [num_blocks, Hkv, 2, block_size, D]        2: key, value; keys rotated

Why not the CPU's [num_blocks, block_size, 2, Hkv, D]: here a program reads one KV head, so there it
would find 2 D bytes of it in a row (128 for SmolLM2), 2 * 2 Hkv D apart. Here the keys of a block
are one run of 2 * 16 * D bytes (2 KiB at D = 64, 8 KiB at 256) and its values are the next one.
Reading decides: a step reads each row's whole context and writes one token of it, and at 256 rows
of 1k tokens the cache is 96 % of all bytes of a Qwen3-0.6B step. Small pages show what short runs
cost: 37 to 55 % of bandwidth has been published for pages of 8 tokens, 15 % for runs of 32 tokens
(FA3 and FA2 on H100). A token's write is 2 Hkv runs of 2 D bytes, whole cache lines from D = 64 on.
A block is still one run of memory, so blocks are copied whole as on the CPU; a head is dimension 1,
so a tensor-parallel worker's cache is just narrower. ``rotary_kv`` and ``attention_prefill`` share
this layout.

Theory of operation
-------------------
A row's visible tokens are cut into tiles of TILE tokens, aligned in the sequence. All tiles of all
rows and KV heads stand in one line, row by row, head by head:

    row 0: [head 0: t t t][head 1: t t t] row 1: [head 0: t t t t t][head 1: t t t t t] row 2: ...
    program 0 ───────────────►|◄─ program 1 ──────────►|◄─ program 2 ──────────►|◄─ ...

Programs take equal shares of the line. So there is no choice to be made by batch or length: one row
of 100k tokens and 256 rows of 100 are cut alike, and no program has more than one tile more than
another. ``plan`` finds once a step, on the device, where each program's share begins; all layers of
a KV group use it.

A *piece* is a program's part of one (row, head). If it is the whole it goes straight to ``out``.
The others, at most the first and the last of each share, go to the program's two places in
``partial``, with the base-2 logarithm of their softmax sums. Whoever finishes the last piece of a
(row, head) adds them all up, in the order of the sequence: the result does not depend on who was
last. Pieces are counted in ``arrivals``, at the program that holds the first one (a share's end
cuts at most one (row, head), so the counter is nobody else's); the last sets it back to 0 for the
next launch. A piece is never empty, and neither is a tile: each has at least one visible token.

Between a piece and its count: all threads' stores, a barrier, an atomic of one thread that releases
and acquires at the scope of the card, a barrier (the atomic's result goes to all threads), loads
that pass the first-level cache by.

A program reads its tile's keys and values for all G = Hq / Hkv query heads of its KV head at once:
G rows, padded to the 16 of ``tl.dot``. Without ``tl.dot`` (cards before sm80) nothing is padded but
to a power of two, and products are sums of broadcast products.

Rows of length 0 are padding: zero in ``out``. Everything that depends on lengths is read on the
device, and grids depend on shapes and the card alone: all launches can be captured in a graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.attention_decode_plan import PLAN_HEADER, DecodeWorkspace, first_seen, piece
from zlm.kernels.chain import LINE_BYTES, begin, call_into_l2
from zlm.kernels.kv_fp8 import FP8, dequantized, even, halves_of_query, odd, reading
from zlm.kernels.launch import direct, power_of_two

from zlm import config as facts

LOG2_E = 1.4426950408889634
LOG2_E_CONSTANT = tl.constexpr(LOG2_E)  # for kernels
AHEAD = tl.constexpr(2)  # tiles that a program asks for before it waits
MERGE_ELEMENTS = 16  # numbers of partial results that a thread reads at once


def reference(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Return attention [R, Hq, D] in float64 of q [R, Hq, D], each the last token of its row."""
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        start = max(0, facts.first_seen(length - 1, window))
        blocks = block_table[row, : -(-length // block_size)].long()
        keys, values = dequantized(cache, blocks, kv_scales)[:, :, start:length]
        queries = q[row].double().unflatten(0, (num_kv_heads, -1))  # [Hkv, G, D]
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            column = sinks.double().view(num_kv_heads, -1, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        out[row] = (weights @ values).flatten(0, 1)
    return out


@triton.jit
def _by_keys(b_q, b_k, USE_DOT: tl.constexpr):
    """Return q·k [G_PAD, TILE]."""
    if USE_DOT:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    else:
        b_s = tl.sum(b_q.to(tl.float32)[:, None, :] * b_k.to(tl.float32)[None, :, :], 2)
    return b_s


@triton.jit
def _by_values(b_p, b_v, b_acc, USE_DOT: tl.constexpr):
    """Return *b_acc* [G_PAD, D_PAD] plus what weights b_p [G_PAD, TILE] take of the values."""
    if USE_DOT:
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    else:
        b_acc += tl.sum(b_p[:, :, None] * b_v.to(tl.float32)[None, :, :], 1)
    return b_acc


@triton.jit
def _tile_scores(
    b_q,
    b_q_odd,
    b_k,
    scale,
    cap,
    SOFTCAP: tl.constexpr,
    USE_DOT: tl.constexpr,
    READ: tl.constexpr,
):
    """Return scores [G_PAD, TILE] times log2(e), soft-capped."""
    if READ == 0:
        b_s = _by_keys(b_q, b_k, USE_DOT)
    else:
        b_s = _by_keys(b_q, even(b_k, b_q, READ), USE_DOT)
        b_s += _by_keys(b_q_odd, odd(b_k, b_q, READ), USE_DOT)
    if SOFTCAP:
        b_s = cap * (1.0 - 2.0 / (tl.exp2(b_s * scale) + 1.0))
    return b_s


@triton.jit
def _merged(
    p_partial,
    p_lse,
    p_sinks,
    i_first,
    i_late,
    n_pieces,
    G: tl.constexpr,
    G_TWO: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Return the sum [G_TWO, D_PAD] of the pieces of one (row, head), PIECES at a time.

    They are the first ones of program *i_first* (with i_late = 1 its last) and those after it.
    p_sinks: those of the KV head's queries.
    """
    i_g = tl.arange(0, G_TWO)
    i_d = tl.arange(0, D_PAD)
    b_m = tl.full([G_TWO], float("-inf"), tl.float32)
    b_l = tl.zeros([G_TWO], tl.float32)
    b_acc = tl.zeros([G_TWO, D_PAD], tl.float32)
    for i_base in range(0, n_pieces, PIECES):
        i_piece = i_base + tl.arange(0, PIECES)
        i_place = (i_first + i_piece) * 2 + tl.where(i_piece == 0, i_late, 0)
        i_from = i_place[:, None] * G + i_g[None, :]
        exists = (i_piece < n_pieces)[:, None] & (i_g < G)[None, :]
        b_lse = tl.load(p_lse + i_from, mask=exists, other=float("-inf"), cache_modifier=".cg")
        p_piece = p_partial + i_from[:, :, None] * D + i_d[None, None, :]
        mask = exists[:, :, None] & (i_d < D)[None, None, :]
        b_piece = tl.load(p_piece, mask=mask, other=0.0, cache_modifier=".cg")
        b_new = tl.maximum(b_m, tl.max(b_lse, 0))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_lse - b_shift[None, :])
        b_alpha = tl.exp2(b_m - b_shift)
        b_acc = b_acc * b_alpha[:, None] + tl.sum(b_weight[:, :, None] * b_piece, 0)
        b_l = b_l * b_alpha + tl.sum(b_weight, 0)
        b_m = b_new
    if SINKS:
        b_sink = tl.load(p_sinks + i_g, mask=i_g < G, other=0.0) * LOG2_E_CONSTANT
        b_l += tl.exp2(b_sink - tl.where(b_m == float("-inf"), 0.0, b_m))
    return b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]


@triton.jit
def _ask_for(
    p_row, p_k, i_n, i_stop, stride_block, D: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Call keys and values, D elements each, of AHEAD tiles from *i_n*, up to *i_stop*, into L2."""
    BYTES: tl.constexpr = p_k.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = D * BYTES // LINE_BYTES if D * BYTES > LINE_BYTES else 1
    i_line = tl.arange(0, 2 * LINES)
    i_line = i_line // LINES * (BLOCK_SIZE * D) + i_line % LINES * (LINE_BYTES // BYTES)
    for i_tile in tl.static_range(AHEAD):
        i_t = i_n + i_tile * TILE
        b_block = tl.load(
            p_row + i_t // BLOCK_SIZE, mask=i_t < i_stop, other=0, cache_modifier=".cg"
        )
        i_token = b_block.to(tl.int64) * stride_block + i_t % BLOCK_SIZE * D
        call_into_l2(p_k + i_token[:, None] + i_line[None, :])


@direct
@triton.jit(do_not_specialize=["p_table", "p_lens", "p_plan", "stride_table", "num_rows"])
def _decode_kernel(
    p_q,
    p_cache,
    p_table,
    p_lens,
    p_plan,
    p_out,
    p_partial,
    p_lse,
    p_arrivals,
    p_sinks,
    p_kv_scales,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_head,
    stride_table,
    stride_out_row,
    stride_out_head,
    num_rows,
    scale,
    cap,
    v_factor,
    HKV: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    G_TWO: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    USE_DOT: tl.constexpr,
    PIECES: tl.constexpr,
    HEADER: tl.constexpr,
    SINKS: tl.constexpr,
    READ: tl.constexpr,
    KV_SCALES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    i_p = tl.program_id(0)
    if not EARLY:
        begin(PDL)
    share = tl.load(p_plan, cache_modifier=".cg")
    total = tl.load(p_plan + 1, cache_modifier=".cg")
    n_empty = tl.load(p_plan + 2, cache_modifier=".cg")
    p_record = p_plan + HEADER + i_p * 4
    i_row = tl.load(p_record, cache_modifier=".cg")
    i_row_start = tl.load(p_record + 1, cache_modifier=".cg")
    i_row_end = tl.load(p_record + 2, cache_modifier=".cg")
    i_len = tl.load(p_record + 3, cache_modifier=".cg")
    p_starts = p_plan + HEADER + tl.num_programs(0) * 4
    i_first_unit = i_p * share
    i_unit = i_first_unit
    # All that was read decides whether there is work, so that all is asked for before the branch.
    works = (i_row >= 0) & (i_row_end > i_row_start) & (i_len > 0)
    i_stop = tl.where(works, tl.minimum(i_unit + share, total), 0)

    i_g = tl.arange(0, G_PAD)
    i_d = tl.arange(0, D_PAD)
    i_t = tl.arange(0, TILE)
    mask_q = (i_g < G)[:, None] & (i_d < D)[None, :]
    PAIR: tl.constexpr = 1 if READ == 0 else 2
    i_w = tl.arange(0, D_PAD // PAIR)  # elements of a token in the cache
    in_w = i_w < D // PAIR
    # Where a token is in its block.
    i_token = (i_t % BLOCK_SIZE)[:, None] * (D // PAIR) + i_w[None, :]

    # Blocks are looked up a tile ahead: keys and values are then asked for without waiting.
    i_head, i_within, n_tiles, i_begin = piece(i_unit, i_row_start, i_len, TILE, WINDOW)
    i_n = i_begin * TILE + i_t
    p_row = p_table + i_row.to(tl.int64) * stride_table
    in_piece = (i_n < i_len) & (i_unit < i_stop)
    b_block = tl.load(p_row + i_n // BLOCK_SIZE, mask=in_piece, other=0, cache_modifier=".cg")
    if EARLY:
        if i_unit < i_stop:
            i_end = tl.minimum(i_len, (i_begin + i_stop - i_unit) * TILE)
            _ask_for(
                p_row, p_cache + i_head.to(tl.int64) * stride_head, i_n, i_end, stride_block,
                D // PAIR, TILE, BLOCK_SIZE, AHEAD,
            )  # fmt: skip
        begin(PDL)

    while i_unit < i_stop:
        n_now = tl.minimum(n_tiles - i_within, i_stop - i_unit)
        # What the next piece needs if it is of the next row: here before it is asked for.
        i_after = tl.minimum(i_row + 1, num_rows - 1)
        i_after_end = tl.load(p_starts + i_after + 1)
        i_after_len = tl.load(p_lens + i_after)

        i_row64 = i_row.to(tl.int64)
        p_query = p_q + i_row64 * stride_q_row + i_head * G * stride_q_head
        p_query = p_query + i_g[:, None] * stride_q_head + i_d[None, :]
        b_q = tl.load(p_query, mask=mask_q, other=0.0)
        b_q_odd = b_q
        if READ != 0:
            b_q, b_q_odd = halves_of_query(b_q)
        p_k = p_cache + i_head.to(tl.int64) * stride_head
        i_visible = first_seen(i_len - 1, WINDOW)
        k_scale = scale
        v_scale = v_factor
        if KV_SCALES:
            k_scale = scale * tl.load(p_kv_scales + i_head)
            v_scale = v_factor * tl.load(p_kv_scales + HKV + i_head)

        b_m = tl.full([G_PAD], float("-inf"), tl.float32)
        b_l = tl.zeros([G_PAD, TILE], tl.float32)  # added up over the tile at the end
        b_acc = tl.zeros([G_PAD, D_PAD // PAIR], tl.float32)
        b_odd = b_acc if READ != 0 else 0.0
        for _ in range(n_now):
            b_next = tl.load(p_row + (i_n + TILE) // BLOCK_SIZE, mask=i_n + TILE < i_len, other=0)
            seen = (i_n < i_len) & (i_n >= i_visible)
            if TILE % BLOCK_SIZE:  # a tile may begin within a block
                i_token = (i_n % BLOCK_SIZE)[:, None] * (D // PAIR) + i_w[None, :]
            p_tile = p_k + b_block.to(tl.int64)[:, None] * stride_block + i_token
            mask_kv = seen[:, None] & in_w[None, :]
            b_k = tl.load(p_tile, mask=mask_kv, other=0)
            b_v = tl.load(p_tile + BLOCK_SIZE * (D // PAIR), mask=mask_kv, other=0)
            b_s = _tile_scores(b_q, b_q_odd, b_k, k_scale, cap, SOFTCAP, USE_DOT, READ)
            b_s = tl.where(seen[None, :], b_s, float("-inf"))
            i_n += TILE
            b_block = b_next
            # The scale, which is positive, is left to the exponent's fused multiply-add.
            factor = 1.0 if SOFTCAP else k_scale
            b_new = tl.maximum(b_m, tl.max(b_s, 1) * factor)
            b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_alpha = tl.exp2(b_m - b_shift)
            b_p = tl.exp2(b_s * factor - b_shift[:, None])
            b_l = b_l * b_alpha[:, None] + b_p
            b_acc = b_acc * b_alpha[:, None]
            if READ == 0:
                b_acc = _by_values(b_p, b_v, b_acc, USE_DOT)
            else:
                b_odd = b_odd * b_alpha[:, None]
                b_acc = _by_values(b_p, even(b_v, b_q, READ), b_acc, USE_DOT)
                b_odd = _by_values(b_p, odd(b_v, b_q, READ), b_odd, USE_DOT)
            b_m = b_new

        b_sum = tl.sum(b_l, 1)
        b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
        b_divisor = b_sum
        if SINKS:  # once: where there are several pieces, when they are merged
            b_sink = tl.load(p_sinks + i_head * G + i_g, mask=i_g < G, other=0.0)
            b_share = tl.exp2(b_sink * LOG2_E_CONSTANT - b_m)
            b_divisor += tl.where(n_now == n_tiles, b_share, 0.0)
        if READ != 0:
            b_acc = tl.reshape(tl.join(b_acc, b_odd) * v_scale, (G_PAD, D_PAD))
        b_result = b_acc / b_divisor[:, None]
        p_whole = p_out + i_row64 * stride_out_row + i_head * G * stride_out_head
        if n_now == n_tiles:
            p_o = p_whole + i_g[:, None] * stride_out_head + i_d[None, :]
            tl.store(p_o, b_result.to(p_out.dtype.element_ty), mask=mask_q)
        else:
            i_place = i_p * 2 + tl.where(i_unit == i_first_unit, 0, 1)
            p_piece = p_partial + (i_place * G + i_g[:, None]) * D + i_d[None, :]
            tl.store(p_piece, b_result, mask=mask_q)
            tl.store(p_lse + i_place * G + i_g, b_m + tl.log2(b_sum), mask=i_g < G)
            i_whole = i_unit - i_within  # where the (row, head) begins in the line
            i_home = i_whole // share
            n_pieces = (i_whole + n_tiles - 1) // share - i_home + 1
            tl.debug_barrier()
            n_before = tl.atomic_add(p_arrivals + i_home, 1, sem="acq_rel", scope="gpu")
            if n_before == n_pieces - 1:
                i_late = tl.where(i_whole == i_home * share, 0, 1)
                b_merged = _merged(
                    p_partial, p_lse, p_sinks + i_head * G if SINKS else p_lse, i_home, i_late,
                    n_pieces, G, G_TWO, D, D_PAD, PIECES, SINKS,
                )  # fmt: skip
                i_h = tl.arange(0, G_TWO)
                p_o = p_whole + i_h[:, None] * stride_out_head + i_d[None, :]
                mask = (i_h < G)[:, None] & (i_d < D)[None, :]
                tl.store(p_o, b_merged.to(p_out.dtype.element_ty), mask=mask)
                tl.store(p_arrivals + i_home, 0)

        i_unit += n_now
        if i_unit < i_stop and i_unit >= i_row_end:
            i_row += 1
            i_row_start = i_row_end
            i_row_end = i_after_end
            i_len = i_after_len
            while i_row_end <= i_unit:  # past rows of length 0
                i_row += 1
                i_row_end = tl.load(p_starts + i_row + 1)
                i_len = tl.load(p_lens + i_row)
        if i_unit < i_stop:
            i_head, i_within, n_tiles, i_begin = piece(i_unit, i_row_start, i_len, TILE, WINDOW)
            i_n = i_begin * TILE + i_t
            p_row = p_table + i_row.to(tl.int64) * stride_table
            b_block = tl.load(p_row + i_n // BLOCK_SIZE, mask=i_n < i_len, other=0)

    if n_empty > 0:
        for i_empty in range(i_p, num_rows, tl.num_programs(0)):
            if tl.load(p_lens + i_empty) <= 0:
                p_whole = p_out + tl.cast(i_empty, tl.int64) * stride_out_row
                b_zero = tl.zeros([G_PAD, D_PAD], p_out.dtype.element_ty)
                for i_head in range(HKV):
                    i_h = i_head * G + i_g
                    p_o = p_whole + i_h[:, None] * stride_out_head + i_d[None, :]
                    tl.store(p_o, b_zero, mask=mask_q)


def attention_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    plan: Tensor,
    *,
    out: Tensor,
    workspace: DecodeWorkspace,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
    early: bool = False,
    pdl: bool = False,
) -> None:
    """Write to *out* [R, Hq, D] the attention of q [R, Hq, D], one token a row, over the cache.

    cache: [num_blocks, Hkv, 2, block_size, D] in the type of q, or e4m3 with *kv_scales* float32
    [2, Hkv] (None: 1). block_table: int32 [R, B].
    seq_lens: int32 [R], tokens of a row with the query's own, whose key is in the cache; 0: a
    padding row. plan: of the same lengths and window (``plan_decode``). The query sees the last
    *window* tokens (0: all; -n: of its chunk of n). *sinks*: float32 [Hq], a score of each head
    that takes its share of the softmax and gives nothing. Rows and heads of q and out may be apart
    by any stride. *early*, *pdl*: see ``zlm.kernels.chain``; *early* is of the plan, the block
    table and all keys and values but the newest token's.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    assert q.dtype == cache.dtype or cache.dtype == FP8
    assert cache.stride()[2:] == (block_size * head_dim, head_dim, 1)
    cache, read_as, factor = reading(cache)
    assert q.stride(2) == 1 and out.stride(2) == 1 and out.shape == q.shape
    if not rows:
        return
    group, config = num_heads // num_kv_heads, workspace.config(rows)
    padded = max(power_of_two(head_dim), 32 if read_as else 16)
    group_two = power_of_two(group)
    _decode_kernel[(workspace.programs(rows),)](
        q,
        cache,
        block_table,
        seq_lens,
        plan,
        out,
        workspace.partial,
        workspace.partial_lse,
        workspace.arrivals,
        sinks,
        kv_scales if read_as else None,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        rows,
        # With a soft cap the exponential is that of tanh: exp(2 score / cap).
        (2.0 * scale / softcap if softcap else scale) * LOG2_E * factor,
        softcap * LOG2_E,
        factor,
        HKV=num_kv_heads,
        G=group,
        G_PAD=max(group_two, 16) if workspace.use_dot else group_two,
        G_TWO=group_two,
        D=head_dim,
        D_PAD=padded,
        TILE=config.tile,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        USE_DOT=workspace.use_dot,
        PIECES=max(MERGE_ELEMENTS * 32 * config.warps // (group_two * padded), 1),
        HEADER=PLAN_HEADER,
        SINKS=sinks is not None,
        READ=read_as,
        KV_SCALES=kv_scales is not None and read_as > 0,
        EARLY=early and pdl,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,  # merging must not cost programs their place on the card
        launch_pdl=pdl,
    )
