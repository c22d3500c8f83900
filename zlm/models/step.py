"""What the layers of a model share in one step: each KV group's plan, each table's rotation."""

from collections.abc import Sequence

from torch import Tensor

from zlm.config import ModelSpec, kv_groups
from zlm.layers.attention import LayerStep, geometry
from zlm.ops.backend import Ops
from zlm.ops.batch import StepBatch


class StepPlanner:
    """Prepares steps for a model of *spec*. Keeps no step."""

    def __init__(self, spec: ModelSpec, ops: Ops, layer_tables: Sequence[Tensor]) -> None:
        """*layer_tables*: each layer's rotary table; layers with the same share one tensor."""
        groups = kv_groups(spec)
        self._ops = ops
        self._geometry = geometry(spec)
        self._first_layers = [group.layers[0] for group in groups]
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._layer_groups = [group_of[layer] for layer in range(spec.num_layers)]
        self._tables = list({id(table): table for table in layer_tables}.values())
        places = {id(table): place for place, table in enumerate(self._tables)}
        self._layer_tables = [places[id(table)] for table in layer_tables]

    def layers(self, batch: StepBatch, caches: list[Tensor]) -> list[LayerStep]:
        """Return the step as each layer sees it; ``caches[layer]`` is its cache."""
        heads = self._geometry
        works = [
            self._ops.plan(batch, g, caches[layer], heads)
            for g, layer in enumerate(self._first_layers)
        ]
        rotations = [self._ops.rotation(table, batch, heads) for table in self._tables]
        return [
            LayerStep(rotations[table], cache, works[group])
            for table, cache, group in zip(
                self._layer_tables, caches, self._layer_groups, strict=True
            )
        ]

    def finish(self, batch: StepBatch, caches: list[Tensor], hidden: Tensor) -> Tensor:
        """Return the step's rows [T, H] of *hidden* [T', H]; see that the caches stay finite."""
        return self._ops.finish(batch, caches, self._layer_groups, hidden)
