"""Paged decode attention in Triton's interpreter, against the float64 reference."""

from dataclasses import replace

import pytest
import torch
import triton_interpreter
from kernel_cases_attention import (
    SMALL_DECODE,
    TOLERANCE,
    AttentionCase,
    decode_both,
    in_fp8,
    relative_error,
)

triton_interpreter.enable()

from zlm.kernels import attention_decode_plan as planning  # noqa: E402
from zlm.kernels.attention_decode_plan import DecodeWorkspace  # noqa: E402

TILE = 16


def attend(case: AttentionCase, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_both(case, torch.float32, "cpu", tile=TILE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("case", SMALL_DECODE, ids=str)
def test_shares_of_the_line(case: AttentionCase, programs: int) -> None:
    out, expected = attend(case, processors=programs)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", SMALL_DECODE[:4], ids=str)
def test_shares_of_two_tiles_at_least(case: AttentionCase) -> None:
    out, expected = attend(case, processors=20, least=2)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", SMALL_DECODE[:4], ids=str)
def test_without_dot(case: AttentionCase) -> None:
    out, expected = attend(case, processors=5, use_dot=False)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", in_fp8(SMALL_DECODE)[1::2], ids=str)
def test_caches_of_fp8(case: AttentionCase) -> None:
    """Issue 6: keys and values of e4m3, and scales of heads, against float64."""
    for use_dot in (True, False):
        out, expected = attend(case, processors=3, use_dot=use_dot)
        assert relative_error(out, expected) < TOLERANCE[torch.float32]
    case = replace(case, kv="fp8")
    out, expected = attend(case, processors=1)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", in_fp8(SMALL_DECODE[:1]), ids=str)
def test_caches_of_fp8_for_bfloat16(case: AttentionCase) -> None:
    """Products are float16 then: no coarser than with a cache of bfloat16."""
    out, expected = decode_both(case, torch.bfloat16, "cpu", processors=3, tile=TILE)
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


def test_many_pieces_are_added_in_more_than_one_turn() -> None:
    """One row over more programs than one turn of the merge takes."""
    case = AttentionCase("long", 4, 1, 128, (900,))
    out, expected = attend(case, processors=9)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def plan_of(
    lengths: list[int], programs: int, **config: int
) -> tuple[torch.Tensor, DecodeWorkspace]:
    workspace = planning.allocate_workspace(
        4,
        2,
        16,
        torch.float32,
        torch.device("cpu"),
        processors=programs,
        configs=(planning.DecodeConfig(TILE, 4, 1, 1, **config),) * 2,
    )
    plan = torch.zeros(planning.plan_size(len(lengths) + 2, workspace), dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    planning.plan_decode(seq_lens, out=plan, workspace=workspace, num_kv_heads=2)
    return plan, workspace


def test_shares_are_equal_and_cover_the_line() -> None:
    """No program has more than a tile more than another, and every tile is someone's."""
    lengths = [1000, 0, 16, 17, 3, 500]
    plan, _ = plan_of(lengths, 7)
    tiles = [-(-length // TILE) * 2 for length in lengths]
    share, total, empty = plan[:3].tolist()
    assert total == sum(tiles) and share == -(-total // 7) and empty == 1
    starts = torch.tensor([0, *tiles]).cumsum(0).tolist()
    assert plan[4 + 4 * 7 :][:7].tolist() == starts
    for program in range(7):
        row, start, end, length = plan[4 + 4 * program :][:4].tolist()
        begin = program * share
        assert start <= begin < end
        assert (start, end, length) == (starts[row], starts[row + 1], lengths[row])


def test_the_least_share_and_the_most_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of([100, 100], 40)[0][0] == 1
    assert plan_of([100, 100], 40, least=3)[0][0] == 3
    assert plan_of([TILE * 2, 1], 40, least=3)[0][0] == 2, "no row has more"
    _, workspace = plan_of([1], 40)
    monkeypatch.setattr(planning, "MOST_PIECE_BYTES", 4 * workspace.partial[0].nbytes)
    assert plan_of([TILE * 9, 1], 40)[0][0] == 3


def test_shares_with_tiles_to_spare_cut_nothing() -> None:
    even, long = [TILE * 4] * 3, [TILE * 40, TILE * 4]
    assert plan_of(even, 9)[0][0] == 3
    assert plan_of(even, 9, spare=1)[0][0] == 4, "a (row, head) each"
    assert plan_of(long, 9)[0][0] == plan_of(long, 9, spare=1)[0][0] == 10
    _, workspace = plan_of(even, 9, spare=1)
    case = AttentionCase("even", 4, 2, 16, (4 * TILE,) * 3)
    out, expected = decode_both(case, torch.float32, "cpu", workspace=workspace)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_few_rows_and_many_share_a_workspace() -> None:
    """Settings with different tiles and programs: the buffers serve either, in any order."""
    few, many = planning.DecodeConfig(16, 4, 1, 1, least=2), planning.DecodeConfig(32, 4, 1, 3)
    workspace = planning.allocate_workspace(
        2, 1, 16, torch.float32, torch.device("cpu"), processors=4, configs=(few, many)
    )
    assert [workspace.config(rows) for rows in (1, 8, 9)] == [few, few, many]
    assert [workspace.programs(rows) for rows in (8, 9)] == [4, 12]
    for rows in (8, 9, 8):
        case = AttentionCase(f"rows-{rows}", 2, 1, 16, tuple(range(60, 60 + 9 * rows, 9)))
        out, expected = decode_both(case, torch.float32, "cpu", workspace=workspace)
        assert relative_error(out, expected) < TOLERANCE[torch.float32]
