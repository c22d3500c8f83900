"""The block pool: reference counts, order of reuse, keys."""

import pytest

from zlm.engine.block_pool import BlockPool, InvariantError

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocating_many_takes_free_blocks_then_cached_ones() -> None:
    pool = BlockPool(6)
    first = pool.allocate()
    pool.publish(first, A)
    pool.release(first)
    assert sorted(pool.allocate_many(5)) == [1, 2, 3, 4, 5]
    assert pool.find(A) is None
    pool.check(dict.fromkeys(range(1, 6), 1))


def test_a_published_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.publish(block, A)
    pool.release(block)
    assert pool.find(A) == block and pool.num_free == 2 and pool.is_idle(block)
    pool.share(block)
    assert not pool.is_idle(block) and pool.num_free == 1
    pool.release(block)
    pool.allocate()  # the free one
    assert pool.find(A) == block
    pool.allocate()  # the cached one
    assert pool.find(A) is None


def test_the_block_released_longest_ago_is_reused_first() -> None:
    pool = BlockPool(4)
    blocks = {key: pool.allocate() for key in (A, B, C)}
    for key, block in blocks.items():
        pool.publish(block, key)
    for key in (B, A, C):
        pool.release(blocks[key])
    pool.share(blocks[B])  # used again: now the newest
    pool.release(blocks[B])
    assert [pool.allocate() for _ in range(3)] == [blocks[A], blocks[C], blocks[B]]


def test_a_shared_block_stays_until_its_last_reference() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 0 and pool.releases == 0
    pool.release(block)
    assert pool.num_free == 1 and pool.releases == 1


def test_equal_contents_keep_the_first_block() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, A)
    pool.publish(second, A)
    pool.publish(first, B)
    assert pool.find(A) == first and pool.find(B) is None
    pool.release(second)
    assert pool.find(A) == first
    pool.check({first: 1})


def test_a_forgotten_key_finds_nothing_and_its_block_is_free() -> None:
    pool = BlockPool(3, keep_contents=True)
    idle, used = pool.allocate(), pool.allocate()
    pool.publish(idle, A, b"text")
    pool.publish(used, B)
    assert pool.contents(idle) == b"text"
    pool.release(idle)
    for key in (A, B, C):
        pool.forget(key)
    assert pool.find(A) is None and pool.find(B) is None and pool.contents(idle) is None
    pool.check({used: 1})


def test_releasing_too_often_is_noticed() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(InvariantError, match="more often"):
        pool.release(block)


def test_check_notices_a_leak_and_a_wrong_count() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    with pytest.raises(InvariantError, match="1 references"):
        pool.check({})
    with pytest.raises(InvariantError, match="block tables hold 2"):
        pool.check({block: 2})
    pool.num_in_use = 0
    with pytest.raises(InvariantError, match="is not 2 KV blocks"):
        pool.check()
