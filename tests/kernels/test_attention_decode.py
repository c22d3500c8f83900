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
    paged,
    queries,
    relative_error,
    with_lengths,
)

triton_interpreter.enable()

from zlm.kernels import attention_decode_plan as planning  # noqa: E402

TILE = 16


def attend(case: AttentionCase, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_both(case, torch.float32, "cpu", tile=TILE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("case", SMALL_DECODE, ids=str)
def test_shares_of_the_line(case: AttentionCase, programs: int) -> None:
    out, expected = attend(case, programs=programs)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", SMALL_DECODE[:4], ids=str)
def test_fixed_splits(case: AttentionCase) -> None:
    out, expected = attend(case, programs=4, fixed_splits=3)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", SMALL_DECODE[:4], ids=str)
def test_without_dot(case: AttentionCase) -> None:
    out, expected = attend(case, programs=5, use_dot=False)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_fixed_splits_do_not_depend_on_company() -> None:
    """The first row has the same bits alone as among others."""
    case = SMALL_DECODE[0]
    alone = with_lengths(case, (100,))
    among = with_lengths(case, (100, 3, 60, 0, 41))
    first, _ = attend(alone, programs=2, fixed_splits=3)
    second, expected = attend(among, programs=5, fixed_splits=3)
    assert relative_error(second, expected) < TOLERANCE[torch.float32]
    rows_alone = paged(alone, torch.float32, "cpu")
    rows_among = paged(among, torch.float32, "cpu")
    keys_alone = rows_alone.cache[rows_alone.block_table[0, :6].long()]
    assert torch.equal(keys_alone, rows_among.cache[rows_among.block_table[0, :6].long()])
    q_alone, q_among = (queries(c, torch.float32, "cpu")[0] for c in (alone, among))
    assert torch.equal(q_alone, q_among)
    assert torch.equal(first[0], second[0])


def test_shares_are_equal_and_cover_the_line() -> None:
    """No program has more than a tile more than another, and every tile is someone's."""
    lengths = torch.tensor([1000, 0, 16, 17, 3, 500], dtype=torch.int32)
    workspace = planning.allocate_workspace(
        4, 2, 16, torch.float32, torch.device("cpu"), max_rows=8, programs=7
    )
    workspace = replace(workspace, config=planning.DecodeConfig(TILE, 4, 1, 1))
    plan = torch.zeros(planning.plan_size(8, workspace), dtype=torch.int32)
    planning.plan_decode(lengths, out=plan, workspace=workspace, num_kv_heads=2)
    tiles = (-(-lengths // TILE) * 2).tolist()
    share, total = plan[:2].tolist()
    assert total == sum(tiles) and share == -(-total // 7)
    starts = torch.tensor([0, *tiles]).cumsum(0).tolist()
    assert plan[4 + 4 * 7 :][:7].tolist() == starts
    for program in range(7):
        row, start, end, length = plan[4 + 4 * program :][:4].tolist()
        begin = program * share
        assert start <= begin < end
        assert (start, end, length) == (starts[row], starts[row + 1], int(lengths[row]))
