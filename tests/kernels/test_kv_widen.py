"""Keys and values of e4m3 widened to float16, in Triton's interpreter."""

import pytest
import torch
import triton_interpreter

from zlm.config import first_seen

triton_interpreter.enable()

from zlm.kernels import kv_widen  # noqa: E402
from zlm.kernels.kv_fp8 import FP8, reading  # noqa: E402

COUNTS = (40, 0, 7, 200, 40, 1, 64)  # tokens of each row in the step
LENGTHS = (40, 5, 300, 200, 1000, 90, 65)  # and of its sequence


def planned(room: int, window: int, least: int = 40) -> tuple[list[int], list[int], int]:
    """Return bases, sources and count; the table of row r has blocks 100 r, 100 r + 1, ..."""
    starts = torch.tensor([3, *COUNTS]).cumsum(0).int()
    table = (torch.arange(len(COUNTS))[:, None] * 100 + torch.arange(70)).int()
    bases, sources, count = (
        torch.full((n,), -9, dtype=torch.int32) for n in (len(COUNTS), room, 1)
    )
    kv_widen.plan_widening(
        table,
        starts,
        torch.tensor(LENGTHS).int(),
        bases=bases,
        sources=sources,
        count=count,
        least=least,
        block_size=16,
        window=window,
    )
    return bases.tolist(), sources.tolist(), count.item()


@pytest.mark.parametrize("window", [0, 50, -64])
def test_blocks_of_long_rows_stand_one_behind_the_other(window: int) -> None:
    bases, sources, count = planned(200, window)
    expected: list[int] = []
    for row, (length, new) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        if new < 40:
            assert bases[row] == -1
            continue
        assert bases[row] == len(expected)
        first = max(0, first_seen(length - new, window)) // 16
        blocks = range(-(-length // 16))
        expected += [100 * row + block if block >= first else -1 for block in blocks]
    assert count == len(expected)
    assert sources == expected + [-9] * (200 - count), "nothing is written beyond"


@pytest.mark.parametrize(
    ("room", "widened"), [(2, []), (3, [0]), (15, [0]), (16, [0, 3]), (84, [0, 3, 4, 6])]
)
def test_rows_are_taken_in_order_while_there_is_room(room: int, widened: list[int]) -> None:
    bases, sources, count = planned(room, 0)
    assert [row for row, base in enumerate(bases) if base >= 0] == widened
    assert count == sum(-(-LENGTHS[row] // 16) for row in widened)
    assert all(source >= 0 for source in sources[:count])


def test_no_row_is_long_enough() -> None:
    bases, _, count = planned(50, 0, least=201)
    assert bases == [-1] * len(COUNTS) and count == 0


@pytest.mark.parametrize("head_dim", [16, 24])
def test_every_number_is_kept(head_dim: int) -> None:
    """All 256 codes but the NaNs, at places of any parity; in float16 they are exact."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(97)
    size = (7, 3, 2, 16, head_dim)
    cache = codes[: torch.Size(size).numel()].view(size).contiguous().view(FP8)
    sources = torch.tensor([6, 0, -1, 3, 5]).int()
    out = torch.full((5, *size[1:]), 7.0, dtype=torch.float16)
    kv_widen.widen(cache, sources, torch.tensor([4]).int(), out=out)
    expected = kv_widen.reference(cache, sources) / reading(cache)[2]
    assert torch.equal(out[[0, 1, 3]], expected[[0, 1, 3]])
    assert bool((out[[2, 4]] == 7.0).all()), "without a source, and beyond the count"
