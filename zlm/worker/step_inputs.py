"""From a step message to what the model reads: rows in order, positions, slots and block tables.

``StepRows`` is the message as arrays, rows of one token first (the order that attention wants);
``batch`` gathers the model's ``StepBatch`` from the slot tables. All of it is a fixed number of
array operations, whatever the number of rows. Owns nothing, changes nothing.

Rows are numbered twice: *message rows* as the engine sent them, in which results are reported, and
*batch rows* with the decodes first. ``order[batch row]`` is the message row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Execute
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.worker.slots import SlotTables

Ints = np.ndarray  # int64


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows and T tokens of one step, in batch order but for the ``sampled_*`` columns."""

    order: Ints  # [R]: message row of each batch row
    slots: Ints  # [R]
    starts: Ints  # [R]
    counts: Ints  # [R]
    offsets: Ints  # [R + 1]: where each row starts in T
    num_decodes: int
    row_of_token: Ints  # [T]
    positions: Ints  # [T]
    sampled_slots: Ints  # [S], in message order
    sampled_lengths: Ints  # [S]: tokens of the row, which is the position of the sampled one
    sampled_tokens: Ints  # [S]: the row's last token in T

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def read(message: Execute) -> StepRows:
    """Return the rows of *message* in batch order."""
    slots = np.frombuffer(message.slots, np.int32).astype(np.int64)
    starts = np.frombuffer(message.starts, np.int32).astype(np.int64)
    counts = np.frombuffer(message.counts, np.int32).astype(np.int64)
    sample = np.frombuffer(message.sample, np.uint8) != 0
    num_rows = len(slots)
    longer = counts > 1
    num_decodes = num_rows - int(longer.sum())
    order = np.argsort(longer, kind="stable")
    lengths = starts + counts
    if num_decodes == num_rows:
        offsets, row_of_token, positions = np.arange(num_rows + 1), order, starts
    else:
        offsets = np.zeros(num_rows + 1, np.int64)
        np.cumsum(counts[order], out=offsets[1:])
        row_of_token = np.repeat(np.arange(num_rows), counts[order])
        positions = np.arange(offsets[-1]) - (offsets[:-1] - starts[order])[row_of_token]
    last_token = np.empty(num_rows, np.int64)
    last_token[order] = offsets[1:] - 1
    return StepRows(
        order=order,
        slots=slots[order],
        starts=starts[order],
        counts=counts[order],
        offsets=offsets,
        num_decodes=num_decodes,
        row_of_token=row_of_token,
        positions=positions,
        sampled_slots=slots[sample],
        sampled_lengths=lengths[sample],
        sampled_tokens=last_token[sample],
    )


def batch(rows: StepRows, tables: SlotTables, windows: list[int], block_size: int) -> StepBatch:
    """Gather the model's batch of *rows* from *tables*; ``windows`` has one entry a KV group."""
    device = tables.tokens.device
    lengths = rows.starts + rows.counts
    assert lengths.max() < tables.max_tokens + 1, "row longer than the token table"
    slots, positions = _tensor(rows.slots, device), _tensor(rows.positions, device)
    token_slots = slots[_tensor(rows.row_of_token, device)]
    index, offset = positions // block_size, positions % block_size
    width = -(-int(lengths.max()) // block_size)
    groups = [
        GroupBatch(
            slot_mapping=table[token_slots, index].long() * block_size + offset,
            block_table=table[:, :width].index_select(0, slots),
            window=window,
        )
        for table, window in zip(tables.blocks, windows, strict=True)
    ]
    return StepBatch(
        token_ids=tables.tokens[token_slots, positions].long(),
        positions=positions,
        query_starts=_tensor(rows.offsets.astype(np.int32), device),
        seq_lens=_tensor(lengths.astype(np.int32), device),
        num_decodes=rows.num_decodes,
        query_lens=rows.counts.tolist(),
        context_lens=lengths.tolist(),
        groups=groups,
    )


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
