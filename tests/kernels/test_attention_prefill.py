"""Paged prefill attention in Triton's interpreter, against the float64 reference."""

from itertools import pairwise

import pytest
import torch
import triton_interpreter
from kernel_cases_attention import (
    SMALL_PREFILL,
    TOLERANCE,
    AttentionCase,
    in_fp8,
    paged,
    prefill_both,
    queries,
    query_starts,
    relative_error,
)

triton_interpreter.enable()

from zlm.kernels import (  # noqa: E402
    attention_prefill as prefill,
    attention_prefill_plan as tiling,
)


@pytest.mark.parametrize("case", [*SMALL_PREFILL, *in_fp8(SMALL_PREFILL)[1:5]], ids=str)
def test_prefill(case: AttentionCase) -> None:
    out, expected = prefill_both(case, torch.float32, "cpu")
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", in_fp8(SMALL_PREFILL), ids=str)
@pytest.mark.parametrize("room", [5, 20])
def test_prefill_of_widened_rows(case: AttentionCase, room: int) -> None:
    """Rows are read as they are or widened, each once, and there may be no room for all."""
    out, expected = prefill_both(case, torch.float16, "cpu", room=room, least=10)
    assert relative_error(out, expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("case", SMALL_PREFILL[:3], ids=str)
@pytest.mark.parametrize("part", [1, 2])
def test_queries_that_are_still_to_be_turned(case: AttentionCase, part: int) -> None:
    out, expected = prefill_both(case, torch.float32, "cpu", rotated=case.head_dim // part)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_a_step_behind_decodes_reads_its_own_rows() -> None:
    """Offsets need not begin at 0: in a mixed step the first tokens belong to decodes."""
    case = SMALL_PREFILL[1]
    rows = paged(case, torch.float32, "cpu")
    q, starts = queries(case, torch.float32, "cpu"), query_starts(case, "cpu")
    before = 5
    padded = torch.cat((torch.full((before, *q.shape[1:]), float("nan")), q))
    out = torch.full((before + len(q), case.num_heads, case.head_dim), float("nan"))
    per_tile = tiling.tile_queries(4, 1, 16, torch.float32, torch.device("cpu"))
    plan = torch.zeros((tiling.num_tiles(len(q), 3, per_tile), 2), dtype=torch.int32)
    tiling.plan_prefill(starts + before, rows.seq_lens, out=plan, queries=per_tile)
    prefill.attention_prefill(
        padded,
        rows.cache,
        rows.block_table,
        starts + before,
        rows.seq_lens,
        plan,
        out=out,
        scale=case.scale,
    )
    expected = prefill.reference(
        q, rows.cache, rows.block_table, starts, rows.seq_lens, scale=case.scale
    )
    assert relative_error(out[before:], expected) < TOLERANCE[torch.float32]
    assert bool(out[:before].isnan().all()), "tokens of other rows are not written"


@pytest.mark.parametrize("window", [0, 64])
def test_plan_lists_every_tile_once_and_heavy_ones_first(window: int) -> None:
    counts, lengths, per_tile = [40, 0, 7, 200, 40, 1], [40, 5, 300, 200, 140, 90], 16
    starts = torch.tensor([3, *counts]).cumsum(0).int()
    items = tiling.num_tiles(sum(counts), len(counts), per_tile) + 3
    plan = torch.full((items, 2), -9, dtype=torch.int32)
    seq_lens = torch.tensor(lengths).int()
    tiling.plan_prefill(starts, seq_lens, out=plan, queries=per_tile, window=window)
    tiles = [(r, t) for r, c in enumerate(counts) for t in range(-(-c // per_tile))]
    listed = [tuple(item) for item in plan.tolist() if item[0] >= 0]
    assert sorted(listed) == tiles
    assert plan[len(tiles) :, 0].eq(-1).all()

    def weight(item: tuple[int, ...]) -> int:
        row, tile = item
        end = min(lengths[row] - counts[row] + (tile + 1) * per_tile, lengths[row])
        return min(end, window + per_tile) if window else end

    assert all(weight(a) >= weight(b) for a, b in pairwise(listed))


def test_plan_of_last_tokens_lists_the_last_tile_of_each_row() -> None:
    counts, per_tile = [40, 0, 16, 17, *[3] * 200, 1], 16
    starts = torch.tensor([3, *counts]).cumsum(0).int()
    plan = torch.full((len(counts), 2), -9, dtype=torch.int32)
    tiling.plan_last_tiles(starts, out=plan, queries=per_tile)
    rows = [(r, -(-c // per_tile) - 1) if c else (-1, 0) for r, c in enumerate(counts)]
    assert [tuple(item) for item in plan.tolist()] == rows


@pytest.mark.parametrize(
    ("tokens", "rows", "most"), [(100, 1, 7), (16, 16, 16), (17, 16, 16), (5, 9, 5), (0, 0, 0)]
)
def test_num_tiles(tokens: int, rows: int, most: int) -> None:
    assert tiling.num_tiles(tokens, rows, 16) == most
