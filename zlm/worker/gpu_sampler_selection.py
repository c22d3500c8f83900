"""What the kernels must do for the rows of a step: which passes, and client lists on the device.

A ``Selection`` is made once for a batch and kept while the same rows sample: a steady decode with
biases, masks or bad words transfers nothing. Its lists are flat entries, each with its row of the
step, in one transfer. Knows neither logits nor tokens; ``zlm.worker.gpu_sampler`` applies it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.worker import sampling_slots
from zlm.worker.gpu_sampler_columns import upload_all
from zlm.worker.sampling_slots import Ints, SamplingSlots, SlotLists


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """Rows that report log-probabilities: ``rows`` and ``counts`` (entries each) int64 [k]."""

    rows: Ints
    counts: Ints
    entries: Tensor  # int32 [k]: ``rows`` on the device


@dataclass(frozen=True, slots=True)
class Selection:
    """For the n rows of a step; None: no row asks for it.

    Entries are int32 columns [e]: ``biases`` rows, ids and values (float32); ``early_ends`` rows,
    ids and lengths from which the ids may be drawn. ``bad_words`` are rows [w], starts [w + 1] and
    ids: word i is ``ids[starts[i] : starts[i + 1]]``.
    """

    min_p: bool
    top_k: bool
    top_p: bool
    penalties: bool
    mask_rows: Tensor | None  # int32 [n]: row of the mask, -1: all ids are allowed
    biases: tuple[Tensor, ...] | None
    early_ends: tuple[Tensor, ...] | None
    bad_words: tuple[Tensor, ...] | None
    reported: ReportedRows | None

    @property
    def edits(self) -> bool:
        """Whether single logits are changed."""
        return any(part is not None for part in (self.biases, self.early_ends, self.bad_words))


def select(host: SamplingSlots, slots: Ints, device: torch.device) -> Selection:
    """Return the selection for rows in *slots*, int64 [n], in that order."""
    lists = host.lists_of(slots)
    reported = host.reported(slots)
    flat = _flat(host, slots, lists) if lists else {}
    if reported:
        flat["reported"] = (reported[0],)
    sent = _upload(flat, device) if flat else {}
    drawing = ~host.greedy[slots]
    column = {name: host.columns[name][slots] for name in ("min_p", "top_k", "top_p")}
    return Selection(
        min_p=bool((drawing & (column["min_p"] > 0)).any()),
        top_k=bool((drawing & (column["top_k"] > 0)).any()),
        top_p=bool((drawing & (column["top_p"] < 1)).any()),
        penalties=bool(host.penalised(slots).any()),
        mask_rows=sent["allowed"][0] if "allowed" in sent else None,
        biases=sent.get("biases"),
        early_ends=sent.get("early_ends"),
        bad_words=sent.get("bad_words"),
        reported=ReportedRows(*reported, sent["reported"][0]) if reported else None,
    )


def _flat(
    host: SamplingSlots, slots: Ints, lists: list[SlotLists]
) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the lists that some row has, as flat columns by name."""
    flat: dict[str, tuple[np.ndarray, ...]] = {}
    if biases := sampling_slots.flat_biases(lists):
        flat["biases"] = (biases.rows, biases.ids, biases.values)
    if ends := host.early_ends(slots, lists):
        flat["early_ends"] = (ends.rows, ends.ids, ends.values)
    if words := sampling_slots.flat_words(lists):
        flat["bad_words"] = (words.rows, words.starts, words.ids)
    has_mask = np.array([entry.allowed_ids is not None for entry in lists])
    if has_mask.any():
        flat["allowed"] = (np.where(has_mask, slots, -1),)
    return flat


def _upload(
    flat: dict[str, tuple[np.ndarray, ...]], device: torch.device
) -> dict[str, tuple[Tensor, ...]]:
    """Copy all columns to *device* at once; integers become int32."""
    columns = [column for columns in flat.values() for column in columns]
    narrow = [c if c.dtype == np.float32 else c.astype(np.int32) for c in columns]
    sent = iter(upload_all(narrow, device))
    return {name: tuple(next(sent) for _ in columns) for name, columns in flat.items()}
