"""Attention said plainly: the meaning that every backend's op must have. Slow, used by tests."""

import torch
from torch import Tensor

from zlm.config import first_seen
from zlm.ops.batch import StepBatch


def attention(
    q: Tensor,
    cache: Tensor,
    batch: StepBatch,
    group_index: int,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Return attention [T, Hq, D] in float32 of q [T, Hq, D] over a paged cache, row by row."""
    group = batch.groups[group_index]
    block_size, num_kv_heads = cache.shape[1], cache.shape[3]
    out = torch.zeros(q.shape)
    first_token = 0
    for row, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        blocks = group.block_table[row, : -(-context // block_size)].long()
        tokens = cache[blocks].flatten(0, 1)[:context].float()
        keys, values = tokens[:, 0], tokens[:, 1]
        for i in range(length):
            position = context - length + i
            start = max(0, first_seen(position, group.window))
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // num_kv_heads)
                query = q[first_token + i, head].float()
                scores = keys[start : position + 1, kv_head] @ query * scale
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                weights = torch.softmax(scores, 0)
                out[first_token + i, head] = weights @ values[start : position + 1, kv_head]
        first_token += length
    return out
