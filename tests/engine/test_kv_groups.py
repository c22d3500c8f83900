"""Block tables over groups: growth, windows, sharing, arithmetic."""

import pytest

from zlm.engine.block_pool import InvariantError
from zlm.engine.kv_groups import KVGroups


def entries(kv: KVGroups) -> list[tuple[int, int, int, int]]:
    taken = kv.take_entries()
    return list(zip(taken.groups, taken.slots, taken.indices, taken.blocks, strict=True))


def test_growth_announces_each_new_block_once() -> None:
    kv = KVGroups([0, 6], [9, 9], 4, 2)
    assert kv.extend(1, 5) == 8
    assert kv.extend(1, 8) == 8
    assert [entry[:3] for entry in entries(kv)] == [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
    assert entries(kv) == []
    kv.extend_each([0, 1])
    assert [entry[:3] for entry in entries(kv)] == [(0, 0, 0), (0, 1, 2), (1, 0, 0), (1, 1, 2)]
    kv.check()


def test_a_window_gives_back_what_is_behind_it() -> None:
    kv = KVGroups([0, 6], [9, 9], 4, 1)
    kv.extend(0, 20)
    entries(kv)
    kv.trim(0, 17)  # reads 12..17
    assert entries(kv) == [(1, 0, 0, 0), (1, 0, 1, 0), (1, 0, 2, 0)]
    assert [pool.num_in_use for pool in kv.pools] == [5, 2]
    kv.check()
    kv.trim(0, 17)
    assert entries(kv) == []
    kv.release(0)
    kv.check_idle()


def test_chunks_give_back_what_is_before_the_current_one() -> None:
    kv = KVGroups([0, -8], [9, 9], 4, 1)
    kv.extend(0, 20)
    entries(kv)
    kv.trim(0, 15)  # reads 8..15
    assert entries(kv) == [(1, 0, 0, 0), (1, 0, 1, 0)]
    kv.trim(0, 16)  # begins a chunk
    assert [pool.num_in_use for pool in kv.pools] == [5, 1]
    kv.check()


def test_release_makes_unsent_entries_void() -> None:
    kv = KVGroups([0], [9], 4, 2)
    kv.extend(0, 4)
    kv.extend(1, 4)
    kv.release(0)
    assert [entry[1] for entry in entries(kv)] == [1]


@pytest.mark.parametrize(("position", "copied"), [(8, False), (9, True), (11, True)])
def test_a_fork_shares_full_blocks_and_copies_the_last(position: int, copied: bool) -> None:
    kv = KVGroups([0, 6], [20, 20], 4, 2)
    kv.extend(0, 12)
    kv.trim(0, position)
    parent = {entry[:3]: entry[3] for entry in entries(kv)}
    assert kv.can_fork(0, position)
    copies = kv.fork(0, 1, position)
    child = {entry[:3]: entry[3] for entry in entries(kv)}
    for group in (0, 1):
        for index in (0, 1):
            assert child[group, 1, index] == parent[group, 0, index]
        assert child[group, 1, 2] not in (0, parent[group, 0, 2])
    expected = [(g, parent[g, 0, 2], child[g, 1, 2]) for g in (0, 1)] if copied else []
    assert copies == expected
    kv.check()
    kv.release(0)
    kv.check()
    kv.release(1)
    kv.check_idle()


def test_no_fork_from_a_sequence_whose_window_has_moved_on() -> None:
    kv = KVGroups([0, 6], [20, 20], 4, 2)
    kv.extend(0, 24)
    kv.trim(0, 12)
    assert kv.can_fork(0, 12)
    kv.trim(0, 16)
    assert not kv.can_fork(0, 12)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, -3, -6, -8])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_most_live_blocks_is_never_exceeded(window: int, chunk: int) -> None:
    length = 40
    most = KVGroups([window], [99], 4, 1).most_live_blocks(0, length, chunk)
    reached = 0
    for first in range(1, chunk + 1):
        kv = KVGroups([window], [99], 4, 1)
        start = 0
        while start < length:
            end = min(length, start + (first if start == 0 else chunk))
            kv.trim(0, start)
            kv.extend(0, end)
            reached = max(reached, kv.pools[0].num_in_use)
            start = end
    assert most - 1 <= reached <= most


def test_longest_sequence() -> None:
    assert KVGroups([0], [5], 4, 1).longest_sequence(100, chunked=True) == 16
    assert KVGroups([0], [99], 4, 1).longest_sequence(100, chunked=True) == 100
    assert KVGroups([6], [4], 4, 1).longest_sequence(100, chunked=True) == 100
    assert KVGroups([6], [3], 4, 1).longest_sequence(100, chunked=True) == 8
    assert KVGroups([6], [4], 4, 1).longest_sequence(100, chunked=False) == 12
    assert KVGroups([0, 6], [7, 4], 4, 1).longest_sequence(100, chunked=True) == 24


def test_a_hit_with_other_contents_is_noticed() -> None:
    """CASES 54: in debug mode token ids are compared on a hit."""
    kv = KVGroups([0], [9], 4, 2, keep_contents=True)
    kv.extend(0, 4)
    kv.publish(0, 0, b"key", b"text")
    assert kv.find_hit([b"key"]) == 1
    with pytest.raises(InvariantError, match="two different texts"):
        kv.adopt(1, [b"key"], [b"other"])


def test_check_notices_a_leak() -> None:
    kv = KVGroups([0], [9], 4, 1)
    kv.pools[0].allocate()
    with pytest.raises(InvariantError):
        kv.check()
    with pytest.raises(InvariantError, match="in use by nobody"):
        kv.check_idle()
