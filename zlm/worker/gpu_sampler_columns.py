"""Sampling parameters by slot on the device, as the kernels read them.

``SlotColumns`` owns one row of four-byte values a parameter, one entry a slot, and what belongs to
slots but is as wide as the vocabulary: the counts that penalties read and the bits of allowed ids.
Both of those are made when the first sequence needs them; slot s has row s. All that a step's joins
change goes to the device in one transfer that nobody waits for.

    table int32 [F, slots]     temperature | min_p | ... (float32 bits) | num_prompt | count_row
    seeds int64 [slots]
    counts int32 [slots, V]    at most; see ``sampling_adjust``
    mask int32 [slots, V/32]   at most; bit i % 32 of word i // 32: whether id i is allowed
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zlm.kernels import sampling_adjust
from zlm.kernels.sampling_columns import Columns
from zlm.worker.gpu_copy import upload
from zlm.worker.sampling_slots import Ints, SamplingSlots

REALS = ("temperature", "min_p", "top_p", "repetition", "presence", "frequency")
FIELDS = (*REALS, "top_k", "num_prompt", "count_row")
ALIGNMENT = 16  # bytes: kernels are compiled anew for pointers that are less aligned


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return *arrays*, each of one dimension, on *device*, by one transfer; views of one tensor."""
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays])
    flat = np.zeros(int(ends[-1]), np.uint8)
    starts = [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays, strict=True):
        flat[start : start + array.nbytes].view(array.dtype)[:] = array
    there = upload(flat, device)
    return [
        there[start : start + array.nbytes].view(getattr(torch, array.dtype.name))
        for start, array in zip(starts, arrays, strict=True)
    ]


def mask_words(vocab_size: int) -> int:
    """Return the int32 words of one row of the mask."""
    return -(-vocab_size // 32)


class SlotColumns:
    """Owns the device's copy of the parameters of *num_slots* slots, dummy included."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        padded = -(-num_slots // 4) * 4  # so that every row of the table is aligned
        self._table = torch.zeros(len(FIELDS), padded, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(padded, dtype=torch.int64, device=device)
        row = {name: self._table[i, :num_slots] for i, name in enumerate(FIELDS)}
        real = {name: row[name].view(torch.float32) for name in REALS}
        self.drawing = Columns(
            seeds=self._seeds[:num_slots],
            temperature=real["temperature"],
            min_p=real["min_p"],
            top_k=row["top_k"],
            top_p=real["top_p"],
        )
        self.repetition = real["repetition"]
        self.presence = real["presence"]
        self.frequency = real["frequency"]
        self.num_prompt = row["num_prompt"]
        self.count_rows = row["count_row"]  # -1: the slot has no penalty
        self.count_rows.fill_(-1)
        self.counts: Tensor | None = None
        self.mask: Tensor | None = None

    def write(self, host: SamplingSlots, slots: Ints, lengths: Ints, tokens: Tensor) -> None:
        """Copy the parameters of *slots* (int64 [J], all different) from *host*.

        ``lengths`` int64 [J] is how many tokens each has in *tokens*, the token table: what
        penalties need is counted there.
        """
        column = {name: values[slots] for name, values in host.columns.items()}
        column["temperature"][host.greedy[slots]] = 0.0
        penalised = host.penalised(slots)
        column["num_prompt"] = host.num_prompt[slots]
        column["count_row"] = np.where(penalised, slots, -1)
        values = np.empty((len(FIELDS), len(slots)), np.int32)
        for i, name in enumerate(FIELDS):
            values[i] = column[name].view(np.int32) if name in REALS else column[name]
        counted = slots[penalised]
        masked = [slot for slot in slots.tolist() if host.lists[slot].allowed_ids is not None]
        sent = upload_all(
            [
                slots,
                column["seed"].view(np.int64),
                values.reshape(-1),
                counted.astype(np.int32),
                host.num_prompt[counted].astype(np.int32),
                lengths[penalised].astype(np.int32),
                np.array(masked, np.int64),
                self._bits(host, masked),
            ],
            self._device,
        )
        where, seeds, table, to_count, num_prompt, known, to_mask, bits = sent
        self._seeds.index_copy_(0, where, seeds)
        self._table.index_copy_(1, where, table.view(values.shape))
        if counted.size:
            self._count(to_count, num_prompt, known, tokens)
        if masked:
            self._allow(to_mask, bits.view(len(masked), -1))

    def _count(self, slots: Tensor, num_prompt: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        if self.counts is None:
            shape = (self._num_slots, self._vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        sampling_adjust.recount(self.counts, slots, slots, num_prompt, lengths, tokens)

    def _allow(self, slots: Tensor, bits: Tensor) -> None:
        if self.mask is None:
            shape = (self._num_slots, mask_words(self._vocab_size))
            self.mask = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self.mask.index_copy_(0, slots, bits)

    def _bits(self, host: SamplingSlots, slots: Sequence[int]) -> np.ndarray:
        """Return the mask rows of *slots*, int32, one after another."""
        bits = np.zeros((len(slots), mask_words(self._vocab_size) * 32), bool)
        for row, slot in zip(bits, slots, strict=True):
            row[host.lists[slot].allowed_ids] = True
        return np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(np.int32)
