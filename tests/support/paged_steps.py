"""Drives a model with steps over a paged KV cache, as the worker does, for tests of models and ops.

Blocks are handed out in a shuffled order and a sliding group gives up the blocks that fall behind
its window: their table entries point at the null block, and what they held is overwritten.
"""

import random

import torch
from torch import Tensor

from zlm.config import ModelSpec, kv_groups
from zlm.models.registry import Model
from zlm.ops import kv_cache
from zlm.ops.batch import GroupBatch, StepBatch


class PagedSequences:
    """Sequences of a model, each with a block table in every KV group."""

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.groups = kv_groups(spec)
        self.block_size = block_size
        self.caches = [
            kv_cache.allocate(
                num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype, "cpu"
            )
            for _ in range(spec.num_layers)
        ]
        order = random.Random(seed)
        self.free = [order.sample(range(1, num_blocks), num_blocks - 1) for _ in self.groups]
        self.tables: dict[int, list[list[int]]] = {}  # sequence: a table in each group
        self.lengths: dict[int, int] = {}

    def step(self, rows: list[tuple[int, list[int]]]) -> list[Tensor]:
        """Compute each row's next tokens (sequence, ids); return each row's logits [count, V].

        Rows of one token must come first.
        """
        with torch.inference_mode():
            batch = self.batch(rows)
            hidden = self.model.forward(batch, self.caches)
            assert hidden.shape[0] == batch.num_tokens
            logits = self.model.logits(hidden)
        self._give_up_blocks()
        return list(logits.split(batch.query_lens))

    def batch(self, rows: list[tuple[int, list[int]]]) -> StepBatch:
        """Take blocks for the rows' new tokens and return the step's batch."""
        counts = [len(ids) for _, ids in rows]
        num_decodes = sum(count == 1 for count in counts)
        assert all(count == 1 for count in counts[:num_decodes])
        starts = [self.lengths.get(sequence, 0) for sequence, _ in rows]
        for (sequence, ids), start in zip(rows, starts, strict=True):
            self._extend(sequence, start + len(ids))
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        offsets = torch.tensor([0, *counts]).cumsum(0)
        return StepBatch(
            token_ids=torch.tensor([token for _, ids in rows for token in ids]),
            positions=torch.cat(
                [torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
            ),
            query_starts=offsets.int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_decodes=num_decodes,
            query_lens=counts,
            context_lens=lengths,
            groups=[self._group(g, rows, starts, counts) for g in range(len(self.groups))],
        )

    def copy(self, source: int, target: int) -> None:
        """Let sequence *target* begin as a copy of *source*, in blocks of its own."""
        self._extend(target, self.lengths[source])
        for g, group in enumerate(self.groups):
            caches = [self.caches[layer] for layer in group.layers]
            kv_cache.copy_blocks(caches, self.tables[source][g], self.tables[target][g])

    def _extend(self, sequence: int, length: int) -> None:
        tables = self.tables.setdefault(sequence, [[] for _ in self.groups])
        for table, free in zip(tables, self.free, strict=True):
            while len(table) * self.block_size < length:
                table.append(free.pop())
        self.lengths[sequence] = length

    def _group(
        self, g: int, rows: list[tuple[int, list[int]]], starts: list[int], counts: list[int]
    ) -> GroupBatch:
        tables = [self.tables[sequence][g] for sequence, _ in rows]
        size = self.block_size
        slots = [
            table[position // size] * size + position % size
            for table, start, count in zip(tables, starts, counts, strict=True)
            for position in range(start, start + count)
        ]
        width = max(
            -(-(start + count) // size) for start, count in zip(starts, counts, strict=True)
        )
        padded = [(table + [0] * width)[:width] for table in tables]
        return GroupBatch(
            slot_mapping=torch.tensor(slots),
            block_table=torch.tensor(padded, dtype=torch.int32),
            window=self.groups[g].window_tokens,
        )

    def _give_up_blocks(self) -> None:
        for g, group in enumerate(self.groups):
            if not group.window_tokens:
                continue
            for sequence, length in self.lengths.items():
                table = self.tables[sequence][g]
                behind = max(0, length + 1 - group.window_tokens) // self.block_size
                for index in range(behind):
                    if table[index]:
                        for layer in group.layers:
                            self.caches[layer][table[index]] = 1e3
                        self.free[g].insert(0, table[index])
                        table[index] = 0
