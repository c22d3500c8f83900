"""The paged KV cache of one layer: how it is laid out, written, gathered and copied.

Its layout is this file's own business (and that of the attention ops beside it). A layer's cache is

    [num_blocks, block_size, 2, num_kv_heads, head_dim]      2: key, value

so that a token's key and value lie together (one copy writes both, straight from the columns of a
merged QKV product) and a block is one long run of memory (gathering a context copies whole blocks).
Keys are stored after rotation. It starts as zeros, and what is not finite is stored as zero: blocks
are handed from one sequence to another, and a masked NaN would still poison a softmax.
"""

import torch
from torch import Tensor


def allocate(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Return the zeroed cache of one layer."""
    shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def block_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block of one layer takes."""
    return block_size * 2 * num_kv_heads * head_dim * dtype.itemsize


def write(cache: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Store keys and values [T, 2, num_kv_heads, head_dim] at ``slot_mapping`` (int64 [T]).

    *kv* may be a strided view; it is made finite in place.
    """
    tokens = kv.flatten(1)
    tokens.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    cache.view(-1, tokens.shape[1]).index_copy_(0, slot_mapping, tokens.to(cache.dtype))


def gather(cache: Tensor, blocks: Tensor, out: Tensor) -> Tensor:
    """Copy whole *blocks* (integers [n]) to *out* [n, block_size, 2, num_kv_heads, head_dim]."""
    return torch.index_select(cache, 0, blocks, out=out)


def copy_blocks(caches: list[Tensor], sources: list[int], targets: list[int]) -> None:
    """Copy blocks *sources* over blocks *targets* in every layer of a group.

    No block may be both a source and a target.
    """
    if not sources:
        return
    device = caches[0].device
    source = torch.tensor(sources, dtype=torch.int64, device=device)
    target = torch.tensor(targets, dtype=torch.int64, device=device)
    for cache in caches:
        cache.index_copy_(0, target, cache.index_select(0, source))
