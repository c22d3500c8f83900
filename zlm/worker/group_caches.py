"""The KV groups of a model as the worker sets them up: facts for the plan, tensors, copies.

The same for every device and for models of text and of vectors: what a cache looks like is its
ops' business.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zlm.config import Resolved, kv_cache_type
from zlm.ops.backend import Ops
from zlm.worker.memory_plan import GroupFacts

log = logging.getLogger("zlm.worker")

# Block size, KV heads, head dimension and type to the bytes of one block of one layer.
BlockBytes = Callable[[int, int, int, torch.dtype], int]

TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def kv_type(resolved: Resolved, compute_type: torch.dtype) -> torch.dtype:
    """Return the type of keys and values where products are of *compute_type*."""
    compute_name = str(compute_type).removeprefix("torch.")
    wanted = resolved.config.cache.kv_cache_dtype
    name = kv_cache_type(wanted, compute_name, resolved.spec, resolved.device)
    if name != compute_name:
        log.info("keys and values are kept in %s", name)
    return TYPES[name]


def facts(resolved: Resolved, block_bytes: BlockBytes, dtype: torch.dtype) -> list[GroupFacts]:
    """Return what the memory plan must know of each KV group, whose caches are of *dtype*.

    block_bytes: an Ops' own.
    """
    size = resolved.config.cache.block_size_tokens
    return [
        GroupFacts(
            window_tokens=group.window_tokens,
            block_bytes=len(group.layers)
            * block_bytes(size, group.num_kv_heads, group.head_dim, dtype),
        )
        for group in resolved.kv_groups
    ]


def allocate(
    resolved: Resolved, totals: Sequence[int], ops: Ops, dtype: torch.dtype
) -> list[Tensor]:
    """Return the cache of each layer, in the layers' order; group g has ``totals[g]`` blocks."""
    size = resolved.config.cache.block_size_tokens
    caches: dict[int, Tensor] = {}
    for group, total in zip(resolved.kv_groups, totals, strict=True):
        for layer in group.layers:
            caches[layer] = ops.allocate_cache(
                total, size, group.num_kv_heads, group.head_dim, dtype
            )
    return [caches[layer] for layer in sorted(caches)]


def copies_by_group(
    copies: Sequence[tuple[int, int, int]], group_layers: Sequence[Sequence[int]]
) -> Iterator[tuple[Sequence[int], list[int], list[int]]]:
    """Yield layers, sources and targets of each group; *copies* are (group, from, to)."""
    for group, layers in enumerate(group_layers):
        sources = [source for g, source, _ in copies if g == group]
        targets = [target for g, _, target in copies if g == group]
        yield layers, sources, targets
