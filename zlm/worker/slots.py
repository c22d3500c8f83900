"""Device-resident tables with one row a slot: what a running sequence is to the worker.

A sequence keeps its slot from join to end, so messages carry only changes and a steady decode
writes nothing here but the sampled tokens. ``SlotTables`` owns the token table, a block table per
KV group, and the sampling parameters; the model runner reads them and stores sampled tokens.

    tokens[slot]           prompt ids | output ids so far | stale
    blocks[group][slot]    block of tokens [i * block_size, (i + 1) * block_size) at index i

Whatever stands behind a sequence's end is stale but always safe to read: ids are in the
vocabulary, blocks exist (a join clears its row to the null block).
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Execute, Join
from zlm.worker.sampling_table import SamplingTable

log = logging.getLogger("zlm.worker")


class SlotTables:
    """Owns all per-slot state of the worker, on *device*.

    ``tokens`` int32 [num_slots, max_model_len + 1] (the last column takes the surplus token of a
    sequence that fills its context); ``blocks`` per KV group int32 [num_slots, B].
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        vocab_size: int,
        num_groups: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._num_groups = num_groups
        self._width = -(-(max_model_len + 1) // block_size)
        self._device = device
        self.tokens = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int32, device=device)
        self.blocks = [
            torch.zeros(num_slots, self._width, dtype=torch.int32, device=device)
            for _ in range(num_groups)
        ]
        self.sampling = SamplingTable(num_slots, vocab_size, device)

    @property
    def max_tokens(self) -> int:
        """Columns of the token table: no position reaches this."""
        return self.tokens.shape[1]

    def apply(self, message: Execute) -> None:
        """Write a step's joins and tokens, then its block-table entries."""
        if message.joins:
            self._join(message.joins)
        if message.tokens:
            places, tokens = read_tokens(message, self._num_slots, self.max_tokens)
            self.tokens.view(-1)[self._index(places)] = self._index(tokens)
        if message.table_slots:
            self._write_blocks(message)

    def store(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Put sampled *tokens* at *positions* of *slots*, all int64 [n]."""
        self.tokens[slots, positions] = tokens.to(torch.int32)

    def reset(self) -> None:
        """Forget every sequence."""
        self.tokens.zero_()
        for table in self.blocks:
            table.zero_()

    def _join(self, joins: Sequence[Join]) -> None:
        self.sampling.join(joins)
        slots, lengths, ids = read_joins(joins, self._num_slots, self.max_tokens, self._vocab_size)
        row = np.repeat(slots, lengths)
        start = np.cumsum(lengths) - lengths
        column = np.arange(ids.size) - np.repeat(start, lengths)
        self.tokens[self._index(row), self._index(column)] = self._index(ids)
        for table in self.blocks:
            table[self._index(slots)] = 0

    def _write_blocks(self, message: Execute) -> None:
        groups, place, blocks = read_entries(message, self._num_slots, self._width)
        for group, table in enumerate(self.blocks):
            mine = groups == group if self._num_groups > 1 else slice(None)
            where, what = last_of_each(place[mine], blocks[mine])
            if where.size:
                table.view(-1)[self._index(where)] = self._index(what)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self._device)


def read_joins(
    joins: Sequence[Join], num_slots: int, max_tokens: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return slots int64 [J], lengths int64 [J] and the token ids of all, int32, one after another.

    Ids were checked long before: what is outside the vocabulary is clipped, and said.
    """
    slots = np.array([join.slot for join in joins], np.int64)
    assert slots.min() >= 0 and slots.max() < num_slots, "slot out of range"
    columns = [np.frombuffer(join.token_ids, np.int32) for join in joins]
    lengths = np.array([column.size for column in columns])
    assert lengths.max() < max_tokens, "sequence longer than the token table"
    ids = np.concatenate(columns)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        log.error("token ids outside the vocabulary reached the worker: clipped")
        ids = ids.clip(0, vocab_size - 1)
    return slots, lengths, ids


def read_tokens(message: Execute, num_slots: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return place (slot * max_tokens + position, int64) and id, int32, of each of its tokens."""
    tokens = np.frombuffer(message.tokens, np.int32)
    slots = np.frombuffer(message.slots, np.int32)[: len(tokens)].astype(np.int64)
    starts = np.frombuffer(message.starts, np.int32)[: len(tokens)]
    assert not len(slots) or slots.max() < num_slots, "slot out of range"
    return slots * max_tokens + starts, tokens


def read_entries(
    message: Execute, num_slots: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return group, place (slot * width + index, int64) and block of each block-table entry."""
    slots = np.frombuffer(message.table_slots, np.int32).astype(np.int64)
    indices = np.frombuffer(message.table_indices, np.int32).astype(np.int64)
    groups = np.frombuffer(message.table_groups, np.int32)
    blocks = np.frombuffer(message.table_blocks, np.int32)
    assert indices.min() >= 0 and indices.max() < width, "block index out of range"
    assert slots.min() >= 0 and slots.max() < num_slots, "slot out of range"
    return groups, slots * width + indices, blocks


def last_of_each(places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the last value written to each place: a scatter with equal places has no order."""
    ordered = np.sort(places)
    if (ordered[1:] != ordered[:-1]).all():
        return places, values
    unique, first = np.unique(places[::-1], return_index=True)
    return unique, values[::-1][first]
