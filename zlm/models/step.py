"""What the layers of a model share in one step: each KV group's plan, each table's rotation."""

from dataclasses import replace

import torch
from torch import Tensor

from zlm.config import ModelSpec, kv_groups, shared_from
from zlm.layers.attention import LayerStep, geometry
from zlm.layers.rotary import layer_ropes, rotary_table
from zlm.ops import segments
from zlm.ops.backend import Ops
from zlm.ops.batch import StepBatch


class StepPlanner:
    """Prepares steps for a model of *spec*. Keeps no step."""

    def __init__(self, spec: ModelSpec, ops: Ops, max_model_len: int) -> None:
        groups = kv_groups(spec)
        self._ops = ops
        self._geometries = [geometry(spec, group.layers[0]) for group in groups]
        self._first_layers = [group.layers[0] for group in groups]
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._windows: tuple[int, ...] = ()  # of each layer, if tokens see those after them
        if spec.bidirectional:
            self._windows = spec.layer_windows or (0,) * spec.num_layers
        self._layer_groups = [group_of[layer] for layer in sorted(group_of)]
        self._caches = _cache_of_layer(spec)
        ropes = [(rope, geometry(spec, i)) for i, rope in enumerate(layer_ropes(spec))]
        kinds = list(dict.fromkeys(ropes))
        self._tables = [
            (rotary_table(rope, heads.head_dim, max_model_len, ops.device), heads)
            for rope, heads in kinds
        ]
        self._layer_tables = [kinds.index(kind) for kind in ropes]  # each layer's, in _tables

    def layers(self, batch: StepBatch, caches: list[Tensor]) -> list[LayerStep]:
        """Return the step as each layer sees it; ``caches[layer]`` is its cache."""
        if self._windows:
            return self._whole_sequences(batch)
        works = [
            self._ops.plan(batch, g, caches[layer], self._geometries[g])
            for g, layer in enumerate(self._first_layers)
        ]
        rotations = [self._ops.rotation(table, batch, heads) for table, heads in self._tables]
        steps = [
            LayerStep(rotations[table], caches[cache], works[self._layer_groups[cache]])
            for table, cache in zip(self._layer_tables, self._caches, strict=True)
        ]
        if batch.picked is not None:
            last = steps[-1]
            steps[-1] = replace(last, work=last.work.last_tokens(), picked=batch.picked)
        return steps

    def _whole_sequences(self, batch: StepBatch) -> list[LayerStep]:
        """Return the step for layers that keep nothing: every row is a whole sequence."""
        device, num_rows = batch.positions.device, self._ops.token_ids(batch).shape[0]
        works = {
            window: segments.plan(batch.query_lens, window, device) for window in self._windows
        }
        rotations = [segments.rotation(t, batch.positions, num_rows) for t, _ in self._tables]
        none = torch.empty(0, device=device)
        return [
            LayerStep(rotations[table], none, works[window])
            for table, window in zip(self._layer_tables, self._windows, strict=True)
        ]

    def finish(self, batch: StepBatch, caches: list[Tensor], hidden: Tensor) -> Tensor:
        """Return the step's rows of *hidden* [T', H]: [T, H], or the picked ones, which it has.

        Sees that the caches stay finite.
        """
        if self._windows:
            return hidden[: batch.num_tokens]
        return self._ops.finish(batch, caches, self._layer_groups, hidden)


def _cache_of_layer(spec: ModelSpec) -> list[int]:
    """Return whose cache each layer uses: its own, or that of the last before of its kind."""
    windows, first = spec.layer_windows or (0,) * spec.num_layers, shared_from(spec)
    last = {window: i for i, window in enumerate(windows[:first])}
    return [i if i < first else last[window] for i, window in enumerate(windows)]
