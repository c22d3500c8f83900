"""The paged KV cache of one layer: how it is laid out, written, gathered and copied.

Its layout is this file's own business (and that of the attention ops beside it). A layer's cache is

    [num_blocks, block_size, 2, num_kv_heads, head_dim]      2: key, value

so that a token's key and value lie together (one copy writes both, straight from the columns of a
merged QKV product) and a block is one long run of memory (gathering a context copies whole blocks).
Keys are stored after rotation. A cache starts as zeros and never keeps what is not finite (see
``scrub``): blocks are handed from one sequence to another, and even a masked NaN poisons a softmax.

A cache of e4m3 (``FP8``) has keys and values over their scales, float32 [2, Hkv], or as they are;
what is beyond its range becomes its largest number. Torch cannot index it: its bytes are (``raw``).
"""

import math
import mmap

import torch
from torch import Tensor

from zlm.ops.batch import StepBatch

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def raw(cache: Tensor) -> Tensor:
    """Return *cache* as torch can index it."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def allocate(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Return the zeroed cache of one layer.

    A CPU's takes memory as it is written to: pages that the system gives are zeros.
    """
    shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = num_blocks * block_bytes(block_size, num_kv_heads, head_dim, dtype)
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def block_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block of one layer takes."""
    return block_size * 2 * num_kv_heads * head_dim * dtype.itemsize


def write(cache: Tensor, kv: Tensor, slot_mapping: Tensor, scales: Tensor | None = None) -> None:
    """Store keys and values at *slot_mapping* (int64 [T]).

    kv [T', 2 * num_kv_heads * head_dim], or with these dimensions apart: keys, then values. It may
    be a strided view; rows from T on are padding. scales: float32 [2, num_kv_heads], of a cache of
    e4m3.
    """
    if kv.dim() != 2:
        kv = kv.flatten(1)
    if kv.shape[0] > slot_mapping.shape[0]:
        kv = kv[: slot_mapping.shape[0]]
    if cache.dtype == FP8:
        wide = kv.float()
        if scales is not None:
            wide = (wide.view(-1, *cache.shape[2:]) / scales.unsqueeze(-1)).flatten(1)
        kv = wide.clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8).view(torch.uint8)
        cache = raw(cache)
    elif kv.dtype != cache.dtype:
        kv = kv.to(cache.dtype)
    cache.view(-1, kv.shape[1]).index_copy_(0, slot_mapping, kv)


def scrub(caches: list[Tensor], layer_groups: list[int], batch: StepBatch, hidden: Tensor) -> None:
    """Zero what a step has stored for tokens whose *hidden* states [T, H] are not finite.

    A key or value that is not finite makes its own token's attention, and all that is computed
    from it, not finite either: so the last hidden states tell for all layers. ``layer_groups``
    has the KV group of each layer.
    """
    finite = torch.isfinite(hidden).all(-1)
    if finite.all():
        return
    broken = (~finite).nonzero().squeeze(1)
    for cache, group in zip(caches, layer_groups, strict=True):
        slots = batch.groups[group].slot_mapping.index_select(0, broken)
        raw(cache).flatten(0, 1).index_fill_(0, slots, 0)


def copy_blocks(caches: list[Tensor], sources: list[int], targets: list[int]) -> None:
    """Copy blocks *sources* over blocks *targets* in every layer of a group.

    No block may be both a source and a target.
    """
    if not sources:
        return
    device = caches[0].device
    source = torch.tensor(sources, dtype=torch.int64, device=device)
    target = torch.tensor(targets, dtype=torch.int64, device=device)
    for cache in map(raw, caches):
        cache.index_copy_(0, target, cache.index_select(0, source))
