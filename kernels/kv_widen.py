"""Keys and values of e4m3 widened to float16, for prompts, whose queries read each many times.

A tile of queries that reads e4m3 turns all it reads into float16 by itself, and a key of a long
prompt is read by dozens of tiles: prefill attention over such a cache took 1.4 to 1.7 times as long
as over one of 16 bits (bench/RESULTS.md). So the blocks of such rows are copied once a layer to
dense ones of float16, which hold every e4m3 number as it is, and attention reads those.

``plan_widening`` finds, once a step, which rows these are and where each one's blocks go: those of
at least *least* tokens in the step, in order, as long as there is room. Row r's i-th block becomes
block ``bases[r] + i``:

    rows          0      1     2            bases    [0, -1, 3]       row 1 has too few tokens
    their blocks  7 3 9  5 6   4 8          sources  [7, 3, 9, 4, 8]  and a count of 5

Numbers are those that ``zlm.kernels.kv_fp8.reading`` tells: on older cards over 256.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.attention_decode_plan import first_seen
from zlm.kernels.chain import begin
from zlm.kernels.kv_fp8 import both, reading
from zlm.kernels.launch import direct, power_of_two, processors_of

PLAN_ROWS = 128  # rows that a program of the plan looks at at once
PLAN_BLOCKS = 256  # blocks that it copies the numbers of at once
PROGRAMS = 8  # of the copy on a multiprocessor
MOST_PAIRS = 2048  # that a program reads at once


@direct
@triton.jit(
    do_not_specialize=["p_table", "p_starts", "p_lens", "stride_table", "num_rows", "capacity"]
)
def _plan_kernel(
    p_table,
    p_starts,
    p_lens,
    p_bases,
    p_sources,
    p_count,
    stride_table,
    num_rows,
    capacity,
    LEAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each row."""
    begin(PDL)
    i_own = tl.program_id(0)
    i_base = 0  # blocks of the rows before
    count = 0
    total = 0
    for i_first in range(0, num_rows, ROWS):
        i_row = i_first + tl.arange(0, ROWS)
        in_rows = i_row < num_rows
        n_queries = tl.load(p_starts + i_row + 1, mask=in_rows, other=0)
        n_queries -= tl.load(p_starts + i_row, mask=in_rows, other=0)
        i_len = tl.load(p_lens + i_row, mask=in_rows, other=0)
        n_blocks = tl.where(n_queries >= LEAST, (i_len + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
        b_end = total + tl.cumsum(n_blocks, 0)
        count = tl.maximum(count, tl.max(tl.where(b_end <= capacity, b_end, 0), 0))
        i_base += tl.sum(tl.where(i_row < i_own, n_blocks, 0), 0)
        total += tl.sum(n_blocks, 0)
    if i_own == 0:
        tl.store(p_count, count)
    n_queries = tl.load(p_starts + i_own + 1) - tl.load(p_starts + i_own)
    i_len = tl.load(p_lens + i_own)
    n_own = (i_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    if (n_queries < LEAST) | (i_base + n_own > capacity):
        tl.store(p_bases + i_own, -1)
        return
    tl.store(p_bases + i_own, i_base)
    i_seen = first_seen(i_len - n_queries, WINDOW) // BLOCK_SIZE
    p_row = p_table + i_own.to(tl.int64) * stride_table
    for i_first in range(0, n_own, BLOCKS):
        i_block = i_first + tl.arange(0, BLOCKS)
        mask = i_block < n_own
        b_block = tl.load(p_row + i_block, mask=mask & (i_block >= i_seen), other=-1)
        tl.store(p_sources + i_base + i_block, b_block, mask=mask)


@direct
@triton.jit(do_not_specialize=["p_sources", "p_count"])
def _widen_kernel(
    p_cache,
    p_sources,
    p_count,
    p_out,
    stride_block,
    stride_head,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    READ: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program takes every so many-th head of a block; a pair becomes two float16."""
    begin(PDL)
    n_parts = tl.load(p_count) * HEADS
    for i_part in range(tl.program_id(0), n_parts, tl.num_programs(0)):
        i_block = tl.load(p_sources + i_part // HEADS).to(tl.int64)
        if i_block >= 0:
            p_pairs = p_cache + i_block * stride_block + i_part % HEADS * stride_head
            p_wide = p_out + tl.cast(i_part, tl.int64) * PAIRS
            for i_first in tl.static_range(0, PAIRS, CHUNK):
                i_pair = i_first + tl.arange(0, CHUNK)
                mask = i_pair < PAIRS
                b_pairs = tl.load(p_pairs + i_pair, mask=mask, other=0)
                tl.store(p_wide + i_pair, both(b_pairs, READ), mask=mask)


def plan_widening(
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    bases: Tensor,
    sources: Tensor,
    count: Tensor,
    least: int,
    block_size: int,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Write which rows of *least* tokens or more are to be widened, and where to (module).

    block_table: int32 [R, B]; query_starts: int32 [R + 1]; seq_lens: int32 [R]; bases: int32 [R],
    -1 for rows that are not; sources: int32 [C], of the blocks there is room for, -1 for those that
    no query of the row sees through its *window* (0: all, -n: that of chunks); count: int32 [1], of
    sources. *pdl*: see ``zlm.kernels.chain``.
    """
    rows = seq_lens.shape[0]
    _plan_kernel[(rows,)](
        block_table,
        query_starts,
        seq_lens,
        bases,
        sources,
        count,
        block_table.stride(0),
        rows,
        sources.shape[0],
        LEAST=least,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        ROWS=PLAN_ROWS,
        BLOCKS=PLAN_BLOCKS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def widen(
    cache: Tensor,
    sources: Tensor,
    count: Tensor,
    *,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Write blocks *sources* of *cache* [num_blocks, Hkv, 2, block_size, D], e4m3, to *out*.

    out: float16 [C, Hkv, 2, block_size, D], contiguous; sources, count: of ``plan_widening``.
    *pdl*: see ``zlm.kernels.chain``.
    """
    heads, pairs = cache.shape[1], cache.shape[3] * cache.shape[4]
    assert cache.stride()[2:] == (pairs, cache.shape[4], 1) and cache.shape[4] % 2 == 0
    assert out.dtype == torch.float16 and out.is_contiguous() and out.shape[1:] == cache.shape[1:]
    cache, read_as, _ = reading(cache)
    programs = min(PROGRAMS * processors_of(cache.device), sources.shape[0] * heads)
    _widen_kernel[(programs,)](
        cache,
        sources,
        count,
        out.view(torch.int32),
        cache.stride(0),
        cache.stride(1),
        HEADS=heads,
        PAIRS=pairs,
        CHUNK=min(power_of_two(pairs), MOST_PAIRS),
        READ=read_as,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def reference(cache: Tensor, sources: Tensor) -> Tensor:
    """Return blocks *sources* of *cache* as float16; zeros for those of -1."""
    stored = cache.view(torch.uint8)[sources.clamp(min=0).long()].view(cache.dtype)
    return torch.where((sources >= 0)[:, None, None, None, None], stored.to(torch.float16), 0.0)
