"""Drives a model with steps over a paged KV cache, as the worker does, for tests of models and ops.

Blocks are handed out in a shuffled order and a sliding group gives up the blocks that fall behind
its window: their table entries point at the null block, and what they held is overwritten.
"""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zlm.config import ModelSpec, first_seen, kv_groups
from zlm.models.registry import Model
from zlm.ops.backend import Ops
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.ops.cpu import CpuOps


@dataclass(frozen=True)
class Padding:
    """What is added to a step, as a runner with buffers of fixed sizes does."""

    decodes: int = 0  # rows of one token, whose slot is in the null block, after the decodes
    rows: int = 0  # rows of no token, at the end
    tokens: int = 0  # tokens of no row, at the end

    def pad(self, batch: StepBatch, *, lengths: bool) -> tuple[StepBatch, Tensor]:
        """Return the padded batch, with lengths on the host or not, and the places of its tokens.

        Fill values are what a runner's buffers may hold there: stale ids, positions out of range.
        """
        nd, after = batch.num_decodes, batch.num_tokens - batch.num_decodes

        def tokens(values: Tensor, decode: int, rest: int) -> Tensor:
            between = torch.full((self.decodes,), decode, dtype=values.dtype)
            end = torch.full((self.tokens,), rest, dtype=values.dtype)
            return torch.cat((values[:nd], between, values[nd:], end))

        def rows(values: Tensor, decode: int, rest: int) -> Tensor:
            between = values.new_full((self.decodes, *values.shape[1:]), decode)
            end = values.new_full((self.rows, *values.shape[1:]), rest)
            return torch.cat((values[:nd], between, values[nd:], end))

        counts = rows(batch.query_starts.diff(), 1, 0)
        seq_lens = rows(batch.seq_lens, 1, 0)
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
        groups = [
            GroupBatch(tokens(g.slot_mapping, 0, 1), rows(g.block_table, 0, 0), g.window)
            for g in batch.groups
        ]
        padded = StepBatch(
            token_ids=tokens(batch.token_ids, 3, 5),
            positions=tokens(batch.positions, 0, 10**6),
            query_starts=starts,
            seq_lens=seq_lens,
            num_decodes=nd + self.decodes,
            query_lens=counts.tolist() if lengths else [],
            context_lens=seq_lens.tolist() if lengths else [],
            groups=groups,
        )
        return padded, torch.cat((torch.arange(nd), nd + self.decodes + torch.arange(after)))


def on(batch: StepBatch, device: torch.device) -> StepBatch:
    """Return *batch* with its tensors on *device*."""
    names = ("token_ids", "positions", "query_starts", "seq_lens")
    moved = {name: getattr(batch, name).to(device) for name in names}
    groups = [
        GroupBatch(g.slot_mapping.to(device), g.block_table.to(device), g.window)
        for g in batch.groups
    ]
    return replace(batch, groups=groups, **moved)


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
        ops: Ops | None = None,
        seed: int = 0,
    ) -> None:
        """*ops*: those of the model; None: the CPU's."""
        self.model = model
        self.ops = ops or CpuOps(dtype)
        self.groups = kv_groups(spec)
        self.block_size = block_size
        caches = {
            layer: self.ops.allocate_cache(
                num_blocks, block_size, group.num_kv_heads, group.head_dim, dtype
            )
            for group in self.groups
            for layer in group.layers
        }
        self.caches = [caches[layer] for layer in sorted(caches)]
        order = random.Random(seed)
        self.free = [order.sample(range(1, num_blocks), num_blocks - 1) for _ in self.groups]
        self.tables: dict[int, list[list[int]]] = {}  # sequence: a table in each group
        self.lengths: dict[int, int] = {}

    def step(
        self, rows: list[tuple[int, list[int]]], padding: Padding | None = None
    ) -> list[Tensor]:
        """Compute each row's next tokens (sequence, ids); return each row's logits [count, V].

        Rows of one token must come first.
        """
        with torch.inference_mode():
            batch = self.batch(rows)
            if padding is None:
                hidden = self.model.forward(on(batch, self.ops.device), self.caches)
                assert hidden.shape[0] == batch.num_tokens
            else:
                padded, places = padding.pad(batch, lengths=self.ops.needs_lengths)
                padded = on(padded, self.ops.device)
                hidden = self.model.forward(padded, self.caches)[places]
            logits = self.model.logits(hidden).cpu()
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
            self.ops.copy_blocks(caches, self.tables[source][g], self.tables[target][g])

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
                behind = max(0, first_seen(length, group.window_tokens)) // self.block_size
                for index in range(behind):
                    if table[index]:
                        for layer in group.layers:
                            self.caches[layer][table[index]] = 1e3
                        self.free[g].insert(0, table[index])
                        table[index] = 0
