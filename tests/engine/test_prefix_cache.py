"""Block keys, and the longest prefix that every group still holds."""

import itertools

import numpy as np
import pytest

from zlm.engine.block_pool import BlockPool
from zlm.engine.prefix_cache import (
    FIELD_ADAPTER,
    FIELD_SALT,
    KEY_BYTES,
    BlockHasher,
    first_live_block,
    longest_hit,
)

TOKENS = np.arange(16, dtype=np.int32).tobytes()


def test_keys_are_128_bits_and_depend_on_parent_and_tokens() -> None:
    hasher = BlockHasher()
    root = hasher.root()
    key = hasher.block(root, TOKENS)
    assert len(root) == len(key) == KEY_BYTES
    assert key == hasher.block(root, TOKENS)
    assert key != hasher.block(key, TOKENS)
    assert key != hasher.block(root, TOKENS[:-4] + b"\1\0\0\0")


def test_every_process_has_its_own_hash_key() -> None:
    assert BlockHasher().root() != BlockHasher().root()
    assert BlockHasher(b"one").block(b"", TOKENS) != BlockHasher(b"two").block(b"", TOKENS)


def test_a_salt_never_collides_with_an_adapter_or_with_two_fields() -> None:
    """CASES 51."""
    hasher = BlockHasher(b"fixed")
    roots = [
        hasher.root(),
        hasher.root([(FIELD_SALT, b"X")]),
        hasher.root([(FIELD_ADAPTER, b"X")]),
        hasher.root([(FIELD_SALT, b"X"), (FIELD_ADAPTER, b"X")]),
        hasher.root([(FIELD_SALT, b"X" + FIELD_ADAPTER + b"\1" + bytes(7) + b"X")]),
        hasher.root([(FIELD_SALT, b"XX")]),
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize(
    ("position", "window", "block"),
    [
        *((0, 6, 0), (5, 6, 0), (8, 6, 0), (9, 6, 1), (17, 6, 3), (17, 0, 0), (8, 1, 2), (7, 1, 1)),
        *((7, -8, 0), (8, -8, 2), (15, -8, 2), (16, -8, 4), (11, -6, 1), (12, -6, 3)),
    ],
)
def test_first_live_block(position: int, window: int, block: int) -> None:
    assert first_live_block(position, window, 4) == block
    if window > 0:  # by definition: the block of the first key that a query at the position reads
        assert block == max(0, position - window + 1) // 4


def _hit_by_trying(present: list[set[int]], windows: list[int], count: int, size: int) -> int:
    for hit in range(count, 0, -1):
        if all(
            set(range(first_live_block(hit * size, window, size), hit)) <= held
            for held, window in zip(present, windows, strict=True)
        ):
            return hit
    return 0


@pytest.mark.parametrize("windows", [[0], [5], [0, 5], [0, 3, 9], [3, 9], [0, -6], [-8, 5]])
def test_longest_hit_equals_trying_every_length(windows: list[int]) -> None:
    count, size = 6, 4
    keys = [bytes([number]) * KEY_BYTES for number in range(count)]
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(400):
        present = [{number for number in range(count) if random.random() < 0.75} for _ in windows]
        pools = []
        for held in present:
            pool = BlockPool(count + 1)
            for number in held:
                pool.publish(pool.allocate(), keys[number])
            pools.append(pool)
        hit = longest_hit(keys, pools, windows, size)
        assert hit == _hit_by_trying(present, windows, count, size)
        seen.add(hit)
    assert len(seen) > 3


def test_a_sliding_group_needs_only_its_window() -> None:
    keys = [bytes([number]) * KEY_BYTES for number in range(4)]
    full, sliding = BlockPool(9), BlockPool(9)
    for key in keys:
        full.publish(full.allocate(), key)
    for key in keys[2:]:
        sliding.publish(sliding.allocate(), key)
    for pools, windows in itertools.permutations([(full, 0), (sliding, 5)]):
        assert longest_hit(keys, *zip(pools, windows, strict=True), 4) == 4
    assert longest_hit(keys[:3], [full, sliding], [0, 5], 4) == 3
    assert longest_hit(keys[:2], [full, sliding], [0, 5], 4) == 0
