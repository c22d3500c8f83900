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

    def run(
        self, q: Tensor, kv: Tensor, cache: Tensor, *, scale: float, softcap: float
    ) -> Tensor: ...


def plan(batch: StepBatch, group_index: int, cache: Tensor, dtype: torch.dtype) -> AttentionPlan:
    """Plan the attention of *batch* for the layers of a group, with queries of *dtype*.

    *cache* is the cache of any of these layers: they are alike.
    """
    if batch.token_ids.device.type == "cpu":
        return cpu_attention.plan(batch, batch.groups[group_index], cache, dtype)
    raise Internal(f"no attention for device {batch.token_ids.device.type}")


def attention(
    q: Tensor, kv: Tensor, cache: Tensor, work: AttentionPlan, *, scale: float, softcap: float = 0.0
) -> Tensor:
    """Return causal, windowed attention [T', Hq * D] of one layer over its paged cache.

    q [T', Hq, D] rotated queries; kv [T', 2, Hkv, D] this step's keys and values, which have been
    written to *cache* before. Query head h reads KV head h // (Hq / Hkv). T' may exceed the step's
    T tokens: rows from T on are padding, and zero in the result. Scores are scaled by *scale*, and
    with *softcap* c > 0 become c tanh(score / c).
    """
    return work.run(q, kv, cache, scale=scale, softcap=softcap)
