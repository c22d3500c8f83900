"""Paged attention: what models call. A plan is made once a step and shared by all layers.

``plan`` turns a step's rows into the work of one KV group (which blocks to read, which tokens see
which); ``attention`` does that work for one layer. Models know nothing of how: the backend is
chosen here, by the device of the batch. ``zlm.ops.reference`` says in plain loops what must come
out.
"""

from typing import Protocol

import torch
from torch import Tensor

from zlm.errors import Internal
from zlm.ops import cpu_attention
from zlm.ops.batch import StepBatch


class AttentionPlan(Protocol):
    """The attention work of one step for the layers of one KV group."""

    def run(self, qkv: Tensor, cache: Tensor, *, scale: float, softcap: float) -> Tensor: ...


def plan(
    batch: StepBatch,
    group_index: int,
    cache: Tensor,
    num_heads: int,
    num_rows: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Plan the attention of *batch* for the layers of a group.

    *cache* is the cache of any of these layers: they are alike. Queries have *num_heads* heads, are
    of *dtype*, and come in *num_rows* rows: the T tokens of the step, then padding.
    """
    if batch.token_ids.device.type == "cpu":
        group = batch.groups[group_index]
        return cpu_attention.plan(batch, group, cache, num_heads, num_rows, dtype)
    raise Internal(f"no attention for device {batch.token_ids.device.type}")


def attention(
    qkv: Tensor, cache: Tensor, work: AttentionPlan, *, scale: float, softcap: float = 0.0
) -> Tensor:
    """Return causal, windowed attention [T', Hq * D] of one layer over its paged cache.

    qkv [T', (Hq + 2 Hkv) * D], contiguous: q, k and v heads of this step's tokens, q and k rotated;
    k and v have been written to *cache* before. Query head h reads KV head h // (Hq / Hkv). What
    padding rows get is finite and means nothing. Scores are scaled by *scale*, and with *softcap*
    c > 0 become c tanh(score / c).
    """
    return work.run(qkv, cache, scale=scale, softcap=softcap)
