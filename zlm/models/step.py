"""What all layers of a model share in one step: padded token ids, and each KV group's work."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.config import ModelSpec, kv_groups
from zlm.ops import attention, kv_cache, linear
from zlm.ops.attention import AttentionPlan
from zlm.ops.batch import StepBatch


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A step as the layers of one KV group see it."""

    slots: Tensor  # int64 [T]: where keys and values go
    work: AttentionPlan


class StepPlanner:
    """Prepares steps for a model of *spec* that computes in *dtype*. Keeps no step."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        groups = kv_groups(spec)
        self._first_layers = [group.layers[0] for group in groups]
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._layer_groups = [group_of[layer] for layer in range(spec.num_layers)]
        self._num_heads = spec.num_heads
        self._dtype = dtype
        self._min_rows = linear.min_rows(device, dtype)

    def num_rows(self, batch: StepBatch) -> int:
        """Return T': the step's tokens, padded to the fewest rows worth computing."""
        return max(batch.num_tokens, self._min_rows)

    def token_ids(self, batch: StepBatch) -> Tensor:
        """Return the step's token ids and padding, int64 [T']."""
        short = self.num_rows(batch) - batch.num_tokens
        return F.pad(batch.token_ids, (0, short)) if short else batch.token_ids

    def layers(self, batch: StepBatch, caches: list[Tensor]) -> list[GroupStep]:
        """Return, for each layer, its group's part of the step."""
        num_rows = self.num_rows(batch)
        groups = []
        for g, layer in enumerate(self._first_layers):
            work = attention.plan(batch, g, caches[layer], self._num_heads, num_rows, self._dtype)
            groups.append(GroupStep(batch.groups[g].slot_mapping, work))
        return [groups[g] for g in self._layer_groups]

    def finish(self, batch: StepBatch, caches: list[Tensor], hidden: Tensor) -> Tensor:
        """Return the step's rows [T, H] of *hidden* [T', H]; see that the caches stay finite."""
        hidden = hidden[: batch.num_tokens]
        kv_cache.scrub(caches, self._layer_groups, batch, hidden)
        return hidden
