"""The paged cache: what is written comes back, block by block."""

import pytest
import torch

from zlm.ops import kv_cache
from zlm.ops.batch import GroupBatch, StepBatch


def cache_of(num_blocks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return kv_cache.allocate(num_blocks, 4, 2, 8, dtype, "cpu")


def test_begins_as_zeros() -> None:
    assert not cache_of(3).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes(dtype: torch.dtype) -> None:
    cache = cache_of(5, dtype)
    assert 5 * kv_cache.block_bytes(4, 2, 8, dtype) == cache.numel() * cache.element_size()


def test_write_takes_a_strided_view_and_touches_nothing_else() -> None:
    cache = cache_of(6)
    kv = torch.randn(4, 56)[:, 24:]  # its last row is padding
    slots = torch.tensor([21, 4, 10])
    kv_cache.write(cache, kv, slots)
    flat = cache.flatten(0, 1).flatten(1)
    assert torch.equal(flat[slots], kv[:3])
    flat[slots] = 0
    assert not cache.any()


def test_write_converts_to_the_type_of_the_cache() -> None:
    cache = cache_of(2, torch.bfloat16)
    kv = torch.randn(1, 2, 2, 8)
    kv_cache.write(cache, kv, torch.tensor([7]))
    assert torch.equal(cache[1, 3], kv[0].bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scrub_zeroes_what_broken_tokens_stored(bad: float) -> None:
    slots = [torch.tensor([4, 9, 5]), torch.tensor([8, 4, 6])]
    groups = [GroupBatch(s, torch.zeros(3, 1, dtype=torch.int32), 0) for s in slots]
    batch = StepBatch(
        token_ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.zeros(3, dtype=torch.int64),
        query_starts=torch.arange(4, dtype=torch.int32),
        seq_lens=torch.ones(3, dtype=torch.int32),
        num_decodes=3,
        query_lens=[1, 1, 1],
        context_lens=[1, 1, 1],
        groups=groups,
    )
    caches = [torch.ones(3, 4, 2, 2, 8) for _ in range(3)]
    hidden = torch.ones(3, 6)
    kv_cache.scrub(caches, [1, 0, 1], batch, hidden)
    assert all(bool((cache == 1).all()) for cache in caches)
    hidden[1, 5] = bad
    kv_cache.scrub(caches, [1, 0, 1], batch, hidden)
    for cache, slot in zip(caches, (4, 9, 4), strict=True):
        flat = cache.flatten(0, 1)
        assert not flat[slot].any()
        assert flat.sum() == 11 * 2 * 2 * 8


def test_copy_blocks_in_all_layers() -> None:
    caches = [cache_of(5).normal_() for _ in range(2)]
    before = [cache.clone() for cache in caches]
    kv_cache.copy_blocks(caches, [1, 1], [2, 4])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 1, 3, 1]])
    kv_cache.copy_blocks(caches, [], [])
