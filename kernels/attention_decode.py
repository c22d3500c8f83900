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

P programs, as many as the card holds at once, take equal shares of the line. So there is no choice
to be made by batch or length: one row of 100k tokens and 256 rows of 100 are cut alike, and no
program has more than one tile more than another. ``plan`` finds once a step, on the device, where
each program's share begins; all layers of a KV group use it.

A *piece* is a program's part of one (row, head). If it is the whole it goes straight to ``out``.
The others, at most the first and the last of each share, go to the program's two places in
``partial``, with the base-2 logarithm of their softmax sums, and the merge kernel adds them up. Its
grid is P too: program p has work if and only if the share of p begins inside a (row, head) as the
first to do so. A piece is never empty, and neither is a tile: each has at least one visible token.

With FIXED_SPLITS = S a (row, head) is cut into S pieces (fewer if it has fewer tiles) wherever it
stands in the line: a row's result then has the same bits in any company (``--deterministic``).

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
from zlm.kernels.attention_decode_plan import DecodeWorkspace, units

LOG2_E = 1.4426950408889634
MERGE_PIECES = 32  # pieces that the merge kernel reads at once


def reference(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Return attention [R, Hq, D] in float64 of q [R, Hq, D], each the last token of its row."""
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        start = max(0, length - window) if window else 0
        blocks = block_table[row, : -(-length // block_size)].long()
        keys, values = cache[blocks].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, start:length]
        queries = q[row].double().unflatten(0, (num_kv_heads, -1))  # [Hkv, G, D]
        scores = queries @ keys.double().transpose(1, 2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        out[row] = (scores.softmax(-1) @ values.double()).flatten(0, 1)
    return out


@triton.jit
def _tile_scores(b_q, b_k, scale, cap, SOFTCAP: tl.constexpr, USE_DOT: tl.constexpr):
    """Return scores [G_PAD, TILE] times log2(e), soft-capped."""
    if USE_DOT:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    else:
        b_s = tl.sum(b_q.to(tl.float32)[:, None, :] * b_k.to(tl.float32)[None, :, :], 2)
    b_s *= scale
    if SOFTCAP:
        b_s = cap * (1.0 - 2.0 / (tl.exp2(b_s) + 1.0))
    return b_s


@triton.jit(do_not_specialize=["p_table", "p_lens", "p_plan", "stride_table", "num_programs"])
def _decode_kernel(
    p_q,
    p_cache,
    p_table,
    p_lens,
    p_plan,
    p_out,
    p_partial,
    p_lse,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_head,
    stride_kv,
    stride_table,
    stride_out_row,
    stride_out_head,
    num_programs,
    scale,
    cap,
    HKV: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    USE_DOT: tl.constexpr,
):
    i_p = tl.program_id(0)
    share = tl.load(p_plan)
    total = tl.load(p_plan + 1)
    p_record = p_plan + 4 + i_p * 4
    i_row = tl.load(p_record)
    i_row_start = tl.load(p_record + 1)
    i_row_end = tl.load(p_record + 2)
    i_len = tl.load(p_record + 3)
    p_starts = p_plan + 4 + num_programs * 4
    i_unit = i_p * share
    i_first_unit = i_unit
    i_stop = tl.minimum(i_unit + share, total)

    i_g = tl.arange(0, G_PAD)
    i_d = tl.arange(0, D_PAD)
    i_t = tl.arange(0, TILE)
    mask_q = (i_g < G)[:, None] & (i_d < D)[None, :]

    while i_unit < i_stop:
        i_first, n_tiles, n_each, n_units = units(i_len, TILE, WINDOW, SPLITS)
        i_head = (i_unit - i_row_start) // n_units
        i_within = (i_unit - i_row_start) % n_units
        n_now = tl.minimum(n_units - i_within, i_stop - i_unit)
        if SPLITS > 0:
            n_now = 1
        i_begin = i_first + i_within * n_each
        i_end = i_first + tl.minimum((i_within + n_now) * n_each, n_tiles)

        i_row64 = i_row.to(tl.int64)
        i_q_head = i_head * G + i_g
        p_query = p_q + i_row64 * stride_q_row + i_q_head[:, None] * stride_q_head + i_d[None, :]
        b_q = tl.load(p_query, mask=mask_q, other=0.0)
        p_row = p_table + i_row64 * stride_table
        p_k = p_cache + i_head.to(tl.int64) * stride_head
        i_visible = 0
        if WINDOW > 0:
            i_visible = tl.maximum(i_len - WINDOW, 0)

        b_m = tl.full([G_PAD], float("-inf"), tl.float32)
        b_l = tl.zeros([G_PAD], tl.float32)
        b_acc = tl.zeros([G_PAD, D_PAD], tl.float32)
        for i_tile in range(i_begin, i_end):
            i_n = i_tile * TILE + i_t
            seen = (i_n < i_len) & (i_n >= i_visible)
            b_block = tl.load(p_row + i_n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            i_token = b_block * stride_block + (i_n % BLOCK_SIZE) * D
            p_tile = p_k + i_token[:, None] + i_d[None, :]
            mask_kv = seen[:, None] & (i_d < D)[None, :]
            b_k = tl.load(p_tile, mask=mask_kv, other=0.0)
            b_v = tl.load(p_tile + stride_kv, mask=mask_kv, other=0.0)
            b_s = _tile_scores(b_q, b_k, scale, cap, SOFTCAP, USE_DOT)
            b_s = tl.where(seen[None, :], b_s, float("-inf"))
            b_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_alpha = tl.exp2(b_m - b_shift)
            b_p = tl.exp2(b_s - b_shift[:, None])
            b_l = b_l * b_alpha + tl.sum(b_p, 1)
            if USE_DOT:
                b_acc = b_acc * b_alpha[:, None]
                b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
            else:
                b_pv = tl.sum(b_p[:, :, None] * b_v.to(tl.float32)[None, :, :], 1)
                b_acc = b_acc * b_alpha[:, None] + b_pv
            b_m = b_new

        b_l = tl.where(b_l == 0.0, 1.0, b_l)
        b_result = b_acc / b_l[:, None]
        if n_now == n_units:
            p_whole = p_out + i_row64 * stride_out_row + i_q_head[:, None] * stride_out_head
            tl.store(p_whole + i_d[None, :], b_result.to(p_out.dtype.element_ty), mask=mask_q)
        else:
            i_place = (i_p * 2 + tl.where(i_unit == i_first_unit, 0, 1)).to(tl.int64)
            if SPLITS > 0:
                i_place = (i_row64 * HKV + i_head) * SPLITS + i_within
            p_piece = p_partial + (i_place * G + i_g[:, None]) * D + i_d[None, :]
            tl.store(p_piece, b_result, mask=mask_q)
            tl.store(p_lse + i_place * G + i_g, b_m + tl.log2(b_l), mask=i_g < G)

        i_unit += n_now
        if i_unit < i_stop:
            while i_row_end <= i_unit:  # on to the next row that has units
                i_row += 1
                i_row_start = i_row_end
                i_row_end = tl.load(p_starts + i_row + 1)
            i_len = tl.load(p_lens + i_row)


@triton.jit(do_not_specialize=["p_lens", "p_plan", "num_rows"])
def _merge_kernel(
    p_lens,
    p_plan,
    p_out,
    p_partial,
    p_lse,
    stride_out_row,
    stride_out_head,
    num_rows,
    HKV: tl.constexpr,
    HKV_PAD: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Add up the pieces of one query head of one (row, KV head); zero the rows of length 0."""
    i_p = tl.program_id(0)
    i_g = tl.program_id(1)
    i_d = tl.arange(0, D_PAD)
    if SPLITS > 0:
        i_row = i_p // HKV
        i_head = i_p % HKV
        _, _, _, n_units = units(tl.load(p_lens + i_row), TILE, WINDOW, SPLITS)
        n_pieces = tl.where(n_units > 1, n_units, 0)
        i_place = i_p * SPLITS
        i_late = 0
    else:
        share = tl.load(p_plan)
        total = tl.load(p_plan + 1)
        i_row = tl.load(p_plan + 4 + i_p * 4)
        i_row_start = tl.load(p_plan + 4 + i_p * 4 + 1)
        _, _, _, n_units = units(tl.load(p_plan + 4 + i_p * 4 + 3), TILE, WINDOW, SPLITS)
        n_units = tl.maximum(n_units, 1)
        i_begin = i_p * share
        i_head = (i_begin - i_row_start) // n_units
        i_within = (i_begin - i_row_start) % n_units
        i_first = i_begin - i_within
        # The share before this one holds the first piece: as its only piece, or as its last.
        works = (i_begin < total) & (i_within > 0) & (i_within <= share)
        n_pieces = tl.where(works, (i_first + n_units - 1) // share - i_p + 2, 0)
        i_place = (i_p - 1) * 2
        i_late = tl.where(i_within < share, 1, 0)

    b_m = float("-inf")
    b_l = 0.0
    b_acc = tl.zeros([D_PAD], tl.float32)
    for i_base in range(0, n_pieces, PIECES):
        i_piece = i_base + tl.arange(0, PIECES)
        exists = i_piece < n_pieces
        if SPLITS > 0:
            i_from = (i_place + i_piece).to(tl.int64)
        else:
            i_from = (i_place + i_piece * 2 + tl.where(i_piece == 0, i_late, 0)).to(tl.int64)
        i_from = i_from * G + i_g
        b_lse = tl.load(p_lse + i_from, mask=exists, other=float("-inf"))
        mask = exists[:, None] & (i_d < D)[None, :]
        b_piece = tl.load(p_partial + i_from[:, None] * D + i_d[None, :], mask=mask, other=0.0)
        b_new = tl.maximum(b_m, tl.max(b_lse, 0))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_lse - b_shift)
        b_alpha = tl.exp2(b_m - b_shift)
        b_acc = b_acc * b_alpha + tl.sum(b_weight[:, None] * b_piece, 0)
        b_l = b_l * b_alpha + tl.sum(b_weight, 0)
        b_m = b_new
    if n_pieces > 0:
        b_result = b_acc / tl.where(b_l == 0.0, 1.0, b_l)
        p_o = p_out + i_row.to(tl.int64) * stride_out_row + (i_head * G + i_g) * stride_out_head
        tl.store(p_o + i_d, b_result.to(p_out.dtype.element_ty), mask=i_d < D)

    i_h = tl.arange(0, HKV_PAD)
    for i_empty in range(i_p, num_rows, tl.num_programs(0)):
        if tl.load(p_lens + i_empty) <= 0:
            p_row = p_out + i_empty * stride_out_row
            p_o = p_row + (i_h * G + i_g)[:, None] * stride_out_head + i_d[None, :]
            b_zero = tl.zeros([HKV_PAD, D_PAD], p_out.dtype.element_ty)
            tl.store(p_o, b_zero, mask=(i_h < HKV)[:, None] & (i_d < D)[None, :])


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
) -> None:
    """Write to *out* [R, Hq, D] the attention of q [R, Hq, D], one token a row, over the cache.

    cache: [num_blocks, Hkv, 2, block_size, D] in the type of q. block_table: int32 [R, B].
    seq_lens: int32 [R], tokens of a row with the query's own, whose key is in the cache; 0: a
    padding row. plan: of the same lengths and window (``plan_decode``). The query sees the last
    *window* tokens (0: all). Rows and heads of q and out may be apart by any stride.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    assert q.dtype == cache.dtype and cache.stride(3) == head_dim and cache.stride(4) == 1
    assert q.stride(2) == 1 and out.stride(2) == 1 and out.shape == q.shape
    if not rows:
        return
    group, config, splits = num_heads // num_kv_heads, workspace.config, workspace.fixed_splits
    padded = max(triton.next_power_of_2(head_dim), 16)
    group_padded = triton.next_power_of_2(group)
    shape = {"HKV": num_kv_heads, "G": group, "D": head_dim, "D_PAD": padded}
    cut = {"TILE": config.tile, "WINDOW": window, "SPLITS": splits}
    _decode_kernel[(workspace.programs,)](
        q,
        cache,
        block_table,
        seq_lens,
        plan,
        out,
        workspace.partial,
        workspace.partial_lse,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        workspace.programs,
        # With a soft cap the exponential is that of tanh: exp(2 score / cap).
        (2.0 * scale / softcap if softcap else scale) * LOG2_E,
        softcap * LOG2_E,
        G_PAD=max(group_padded, 16) if workspace.use_dot else group_padded,
        BLOCK_SIZE=block_size,
        SOFTCAP=softcap > 0.0,
        USE_DOT=workspace.use_dot,
        num_warps=config.warps,
        num_stages=config.stages,
        **shape,
        **cut,
    )
    merges = rows * num_kv_heads if splits else workspace.programs
    _merge_kernel[(merges, group)](
        seq_lens,
        plan,
        out,
        workspace.partial,
        workspace.partial_lse,
        out.stride(0),
        out.stride(1),
        rows,
        HKV_PAD=triton.next_power_of_2(num_kv_heads),
        PIECES=MERGE_PIECES,
        num_warps=4,
        **shape,
        **cut,
    )
