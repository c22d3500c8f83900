"""The slots' tables on a GPU: tokens and block tables, changed without waiting for the device.

As ``zlm.worker.slots``, but one tensor holds the block tables of all KV groups, one more slot is
the *dummy* that padding rows have, and every change is an asynchronous copy in the stream's order.

    tokens int32 [num_slots + 1, max_model_len + 1]
    blocks int32 [num_groups, num_slots + 1, B]

Sampling parameters live in the sampler (``zlm.worker.gpu_sampler``).
"""

from collections.abc import Sequence

import numpy as np
import torch

from zlm.kernels import step_state
from zlm.messages import Execute, Join
from zlm.worker import slots
from zlm.worker.gpu_copy import staged, upload


class GpuTables:
    """Owns the token table and the block tables of all slots, on *device*."""

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
        self.dummy_slot = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._width = -(-(max_model_len + 1) // block_size)
        self.block_size = block_size
        self.tokens = torch.zeros(
            num_slots + 1, max_model_len + 1, dtype=torch.int32, device=device
        )
        self.blocks = torch.zeros(
            num_groups, num_slots + 1, self._width, dtype=torch.int32, device=device
        )

    @property
    def max_tokens(self) -> int:
        """Columns of the token table: no position reaches this."""
        return self.tokens.shape[1]

    def apply(self, message: Execute) -> None:
        """Write a step's joins and tokens, then its block-table entries."""
        if message.joins:
            self._join(message.joins)
        if message.tokens:
            self._write_tokens(message)
        if message.table_slots:
            self._write_blocks(message)

    def reset(self) -> None:
        """Forget every sequence."""
        self.tokens.zero_()
        self.blocks.zero_()

    def _join(self, joins: Sequence[Join]) -> None:
        taken, lengths, ids = slots.read_joins(
            joins, self.dummy_slot, self.max_tokens, self._vocab_size
        )
        host, start = staged(ids), 0
        for slot, length in zip(taken.tolist(), lengths.tolist(), strict=True):
            row = self.tokens[slot, :length]
            row.copy_(host[start : start + length], non_blocking=True)
            self.blocks[:, slot].zero_()
            start += length

    def _write_tokens(self, message: Execute) -> None:
        places, tokens = slots.read_tokens(message, self.dummy_slot, self.max_tokens)
        where, what = upload(places, self._device), upload(tokens, self._device)
        self.tokens.view(-1).index_copy_(0, where, what)

    def _write_blocks(self, message: Execute) -> None:
        groups, place, blocks = slots.read_entries(message, self.dummy_slot, self._width)
        place = place + groups.astype(np.int64) * (self.blocks.shape[1] * self._width)
        assert groups.min() >= 0 and groups.max() < self.blocks.shape[0], "group out of range"
        where, what = slots.last_of_each(place, blocks)
        entries = np.stack((where.astype(np.int32), what), axis=1)
        step_state.write_blocks(upload(entries, self._device), self.blocks)
