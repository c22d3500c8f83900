"""The paged cache: what is written comes back, block by block."""

import pytest
import torch

from zlm.ops import kv_cache


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
    heads = torch.randn(3, 7, 8)
    kv = heads[:, 3:].unflatten(1, (2, 2))
    slots = torch.tensor([21, 4, 10])
    kv_cache.write(cache, kv, slots)
    flat = cache.flatten(0, 1)
    assert torch.equal(flat[slots], kv)
    flat[slots] = 0
    assert not cache.any()


def test_write_stores_what_is_not_finite_as_zero() -> None:
    cache = cache_of(2)
    kv = torch.ones(1, 2, 2, 8)
    kv[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    kv_cache.write(cache, kv, torch.tensor([5]))
    assert cache.isfinite().all()
    assert cache.sum() == 2 * 2 * 8 - 3


def test_write_converts_to_the_type_of_the_cache() -> None:
    cache = cache_of(2, torch.bfloat16)
    kv = torch.randn(1, 2, 2, 8)
    kv_cache.write(cache, kv, torch.tensor([7]))
    assert torch.equal(cache[1, 3], kv[0].bfloat16())


def test_gather() -> None:
    cache = cache_of(5).normal_()
    blocks = torch.tensor([3, 0, 3], dtype=torch.int32)
    out = torch.empty(3, *cache.shape[1:])
    assert torch.equal(kv_cache.gather(cache, blocks, out), cache[[3, 0, 3]])


def test_copy_blocks_in_all_layers() -> None:
    caches = [cache_of(5).normal_() for _ in range(2)]
    before = [cache.clone() for cache in caches]
    kv_cache.copy_blocks(caches, [1, 1], [2, 4])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 1, 3, 1]])
    kv_cache.copy_blocks(caches, [], [])
