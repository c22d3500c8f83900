"""What prefill attention runs: its tuned settings, and the tiles of a step in order.

``plan_prefill`` lists the (row, tile) of a step on the device, *heavy tiles first*: the last tiles
of a long prompt see the most keys, and if they came last the card would wait for them. A tile's
weight is the number of keys that it sees, at most window + BLOCK_Q. Weights grow along a row, so a
tile's rank in the list is a sum over rows of a closed form, and nothing has to be sorted. All
layers of a KV group use the list.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two

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


# By padded head_dim, for q of 2 bytes. Measured on an H200 (not 32): ``bench/attention.py``.
# With n stages keys and values come n - 1 steps ahead and have n buffers (seen in the compiled code
# of Triton 3.6).
CONFIGS: dict[str, dict[int, PrefillConfig]] = {
    "NVIDIA H200": {
        32: PrefillConfig(64, 64, 4, 3, 3),
        64: PrefillConfig(64, 64, 4, 3, 3),
        128: PrefillConfig(128, 64, 8, 2, 2),
        256: PrefillConfig(128, 32, 8, 3),
        512: PrefillConfig(64, 32, 8, 2),  # not measured
    },
}
# For a cache of e4m3 that tiles widen themselves, where they differ; block_m must not.
FP8_CONFIGS: dict[str, dict[int, PrefillConfig]] = {
    "NVIDIA H200": {
        128: PrefillConfig(128, 32, 8, 3, 2),
        256: PrefillConfig(128, 64, 8, 2),
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


@direct
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


@direct
@triton.jit(do_not_specialize=["p_starts", "p_work", "num_rows"])
def _last_tiles_kernel(
    p_starts, p_work, num_rows, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = i_row < num_rows
    n_queries = tl.load(p_starts + i_row + 1, mask=mask, other=0)
    n_queries -= tl.load(p_starts + i_row, mask=mask, other=0)
    p_item = p_work + i_row * 2
    tl.store(p_item, tl.where(n_queries > 0, i_row, -1), mask=mask)
    tl.store(p_item + 1, tl.maximum(n_queries - 1, 0) // BLOCK_Q, mask=mask)


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
    block_m = (config or config_of(device, head_dim, dtype)).block_m
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
    _plan_kernel[(cdiv(items, PLAN_ITEMS),)](
        query_starts,
        seq_lens,
        out,
        rows,
        items,
        BLOCK_Q=queries,
        CAP=abs(window) + queries if window else 0,
        ITEMS=PLAN_ITEMS,
        ROWS=PLAN_ROWS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def plan_last_tiles(query_starts: Tensor, *, out: Tensor, queries: int, pdl: bool = False) -> None:
    """Write to *out* (int32 [R, 2]) the last tile of each row alone, as ``plan_prefill`` does.

    For a layer whose other queries nobody needs. Arguments as there.
    """
    rows = query_starts.shape[0] - 1
    assert out.dtype == torch.int32 and out.is_contiguous() and out.shape == (rows, 2)
    _last_tiles_kernel[(cdiv(rows, PLAN_ROWS),)](
        query_starts,
        out,
        rows,
        BLOCK_Q=queries,
        ROWS=PLAN_ROWS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def config_of(
    device: torch.device, head_dim: int, dtype: torch.dtype, *, reads_pairs: bool = False
) -> PrefillConfig:
    """Return the setting for queries of *dtype*; *reads_pairs*: that read e4m3 (``kv_fp8``)."""
    if dtype.itemsize > 2:
        return WIDE_CONFIG
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    width = max(power_of_two(head_dim), 32)
    plain = CONFIGS.get(name, DEFAULT_CONFIGS)[width]
    return FP8_CONFIGS.get(name, {}).get(width, plain) if reads_pairs else plain
