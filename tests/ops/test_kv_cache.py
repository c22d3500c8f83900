"""The paged cache: what is written comes back, block by block."""

import os

import pytest
import torch

from zlm.ops import kv_cache
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.process.linux import memory_bytes


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


def test_fp8_is_divided_rounded_scrubbed_and_copied() -> None:
    """What is beyond the range becomes its largest number; what is not finite is not kept."""
    cache = cache_of(3, kv_cache.FP8)
    kv = torch.full((2, 2, 2, 8), 3.3)
    kv[0, 1, 0], kv[1, 0, 0, 3] = 1e4, float("nan")
    scales = torch.tensor([[1.0, 2.0], [0.5, 1.0]])
    kv_cache.write(cache, kv, torch.tensor([4, 5]), scales)
    assert cache[1, 0, :, :, 0].float().tolist() == [[3.25, 1.625], [448.0, 3.25]]
    batch = StepBatch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.arange(2),
        query_starts=torch.tensor([0, 2]),
        seq_lens=torch.tensor([2]),
        num_decodes=0,
        query_lens=[2],
        context_lens=[2],
        groups=[GroupBatch(torch.tensor([4, 5]), torch.tensor([[1]]), 0)],
    )
    kv_cache.scrub([cache], [0], batch, torch.tensor([[1.0], [float("nan")]]))
    assert not cache[1, 1].float().any() and cache[1, 0].float().all()
    kv_cache.copy_blocks([cache], [1], [2])
    assert torch.equal(cache[2].float(), cache[1].float())


def test_takes_memory_as_it_is_written_to() -> None:
    """Issue 6: a start takes no more than the weights, a server what its sequences fill."""
    before = memory_bytes(os.getpid())
    cache = kv_cache.allocate(2000, 16, 4, 128, torch.bfloat16, "cpu")  # 62 MiB
    taken = memory_bytes(os.getpid()) - before
    cache[:100] = 1
    filled = memory_bytes(os.getpid()) - before
    assert taken < 8 * 2**20 and taken + 3 * 2**20 < filled < 16 * 2**20
    assert not cache[1000].any()
