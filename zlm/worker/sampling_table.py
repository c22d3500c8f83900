"""Sampling parameters as the CPU sampler reads them, for the rows that sample in a step.

``SamplingTable.rows(slots)`` gathers what the sampler needs for the rows of a step into
``SamplingRows``: only the features that some row uses are there, the rest is None, so a steady
greedy batch costs nothing. The selection is kept until another batch or a join makes it stale; a
steady decode reuses it. The parameters themselves are in ``zlm.worker.sampling_slots``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Join
from zlm.worker import sampling_slots
from zlm.worker.sampling_slots import FlatEntries, SamplingSlots, SlotLists


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Rows with a repetition penalty: ``rows`` int64 [k], ``factor`` float32 [k]."""

    rows: Tensor
    factor: Tensor


@dataclass(frozen=True, slots=True)
class OutputPenalty:
    """Rows with presence or frequency penalties. All [k]; ``num_prompt`` int64, then float32."""

    rows: Tensor
    num_prompt: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """Flat (row, token, value) entries: ``rows`` and ``ids`` int64 [e], ``values`` [e]."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class AllowedIds:
    """Rows that may only use some tokens: ``rows`` int64 [k], ``mask`` bool [k, V]."""

    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """All bad words of the rows, flat. ``rows``, ``num_prompt``, ``last`` are int64 [w].

    A word's tokens before its last are the prefix entries with its index in ``prefix_word``;
    ``prefix_back`` counts back from the end of the row (1 is the newest token). int64 [p].
    """

    rows: Tensor
    num_prompt: Tensor
    last: Tensor
    prefix_word: Tensor
    prefix_back: Tensor
    prefix_ids: Tensor


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that draw. All [k]; ``plain`` and ``cut`` index into them, int64.

    ``cut`` rows have top_k or top_p; ``plain`` rows at most min_p. ``rows`` None: all rows, in
    order. ``largest_top_k`` is of the cut rows, ``open_ended`` says that some of them has none.
    """

    rows: Tensor | None
    seeds: Tensor  # int64
    temperature: Tensor  # float32
    min_p: Tensor  # float32
    top_k: Tensor  # int64, 0: off
    top_p: Tensor  # float32
    plain: Tensor
    cut: Tensor
    any_min_p: bool
    largest_top_k: int
    open_ended: bool


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """Rows that report log-probabilities: ``rows`` int64 [k], ``counts`` int64 [k] entries each."""

    rows: Tensor
    counts: Tensor
    most: int  # the largest of ``counts``


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the sampler must do for the n rows of a step; None: no row asks for it."""

    slots: Tensor  # int64 [n]
    repetition: RepetitionPenalty | None
    output_penalty: OutputPenalty | None
    bias: Entries | None
    allowed: AllowedIds | None
    bad_words: BadWords | None
    early_ends: Entries | None  # values: length, prompt included, from which the ids may be drawn
    random: RandomRows | None
    reported: ReportedRows | None

    @property
    def untouched(self) -> bool:
        """Whether sampling works on the model's own logits."""
        changes = (self.repetition, self.output_penalty, self.bias, self.allowed)
        return all(c is None for c in (*changes, self.bad_words, self.early_ends))


class SamplingTable:
    """Owns the sampling parameters of all slots and the last selection made of them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._slots = SamplingSlots(num_slots, vocab_size)
        self.num_prompt = self._slots.num_prompt
        self.prompt_logprobs = self._slots.columns["prompt_logprobs"]
        self._selection: tuple[bytes, SamplingRows] | None = None

    def join(self, joins: Sequence[Join]) -> None:
        """Write the parameters of sequences that take a slot; whatever stood there is gone."""
        self._slots.join(joins)
        self._selection = None

    def rows(self, slots: np.ndarray) -> SamplingRows:
        """Return the selection for rows in *slots*, int64 [n], in that order."""
        key = slots.tobytes()
        if self._selection is None or self._selection[0] != key:
            self._selection = (key, self._select(slots))
        return self._selection[1]

    def _select(self, slots: np.ndarray) -> SamplingRows:
        lists = self._slots.lists_of(slots)
        return SamplingRows(
            slots=self._tensor(slots),
            repetition=self._repetition(slots),
            output_penalty=self._output_penalty(slots),
            bias=self._entries(sampling_slots.flat_biases(lists)) if lists else None,
            allowed=self._allowed(lists) if lists else None,
            bad_words=self._bad_words(slots, lists) if lists else None,
            early_ends=self._entries(self._slots.early_ends(slots, lists)) if lists else None,
            random=self._random(slots),
            reported=self._reported(slots),
        )

    def _repetition(self, slots: np.ndarray) -> RepetitionPenalty | None:
        factor = self._slots.columns["repetition"][slots]
        rows = np.flatnonzero(factor != 1.0)
        if not rows.size:
            return None
        return RepetitionPenalty(self._tensor(rows), self._tensor(factor[rows]))

    def _output_penalty(self, slots: np.ndarray) -> OutputPenalty | None:
        column = self._slots.columns
        presence, frequency = column["presence"][slots], column["frequency"][slots]
        rows = np.flatnonzero((presence != 0.0) | (frequency != 0.0))
        if not rows.size:
            return None
        columns = (rows, self.num_prompt[slots[rows]], presence[rows], frequency[rows])
        return OutputPenalty(*map(self._tensor, columns))

    def _entries(self, flat: FlatEntries | None) -> Entries | None:
        if flat is None:
            return None
        return Entries(*map(self._tensor, (flat.rows, flat.ids, flat.values)))

    def _allowed(self, lists: list[SlotLists]) -> AllowedIds | None:
        rows = [row for row, entry in enumerate(lists) if entry.allowed_ids is not None]
        if not rows:
            return None
        mask = np.zeros((len(rows), self._slots.vocab_size), bool)
        for k, row in enumerate(rows):
            mask[k, lists[row].allowed_ids] = True
        return AllowedIds(self._tensor(np.array(rows)), self._tensor(mask))

    def _bad_words(self, slots: np.ndarray, lists: list[SlotLists]) -> BadWords | None:
        words = sampling_slots.flat_words(lists)
        if words is None:
            return None
        rows, ids = words.rows, words.ids
        word_of = np.repeat(np.arange(rows.size), np.diff(words.starts))
        back = words.starts[1:][word_of] - 1 - np.arange(ids.size)  # 0 is the word's last token
        prefix = back > 0
        columns = (
            rows,
            self.num_prompt[slots][rows],
            ids[back == 0],
            word_of[prefix],
            back[prefix],
            ids[prefix],
        )
        return BadWords(*map(self._tensor, columns))

    def _random(self, slots: np.ndarray) -> RandomRows | None:
        rows = np.flatnonzero(~self._slots.greedy[slots])
        if not rows.size:
            return None
        column = {name: values[slots[rows]] for name, values in self._slots.columns.items()}
        top_k, is_cut = column["top_k"], (column["top_k"] > 0) | (column["top_p"] < 1.0)
        return RandomRows(
            rows=None if rows.size == slots.size else self._tensor(rows),
            seeds=self._tensor(column["seed"].view(np.int64)),
            temperature=self._tensor(column["temperature"]),
            min_p=self._tensor(column["min_p"]),
            top_k=self._tensor(top_k),
            top_p=self._tensor(column["top_p"]),
            plain=self._tensor(np.flatnonzero(~is_cut)),
            cut=self._tensor(np.flatnonzero(is_cut)),
            any_min_p=bool((column["min_p"] > 0).any()),
            largest_top_k=int(top_k.max(initial=0)),
            open_ended=bool((top_k[is_cut] == 0).any()),
        )

    def _reported(self, slots: np.ndarray) -> ReportedRows | None:
        reported = self._slots.reported(slots)
        if reported is None:
            return None
        rows, counts = reported
        return ReportedRows(self._tensor(rows), self._tensor(counts), int(counts.max()))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
