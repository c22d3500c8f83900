"""Sampling parameters of every slot, and their selection for the rows that sample in a step.

``SamplingTable`` owns one column a parameter, one entry a slot, written when a sequence joins.
``rows(slots)`` gathers what the sampler needs for the rows of a step into ``SamplingRows``: only
the features that some row uses are there, the rest is None, so a steady greedy batch costs nothing.
The selection is kept until another batch or a join makes it stale; a steady decode reuses it.

Client lists (biases, allowed ids, early ends, bad words) are ragged: they are kept a slot at a
time and strung together into flat columns when a selection is made. Ids are checked long before
they get here; one outside the vocabulary is dropped, so that it can never index out of bounds.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Join, SamplingSpec
from zlm.sampling_params import GREEDY_BELOW

log = logging.getLogger("zlm.worker")

Ints = np.ndarray  # int64 [m]


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


@dataclass(frozen=True, slots=True)
class SlotLists:
    """The ragged lists of one slot."""

    bias_ids: Ints
    bias_values: np.ndarray  # float32
    allowed_ids: Ints | None
    early_ids: Ints
    bad_words: list[Ints]


NO_LISTS = SlotLists(
    np.empty(0, np.int64), np.empty(0, np.float32), None, np.empty(0, np.int64), []
)

COLUMNS: dict[str, tuple[type, Callable[[SamplingSpec], float]]] = {
    "temperature": (np.float32, lambda s: s.temperature),
    "top_p": (np.float32, lambda s: s.top_p),
    "top_k": (np.int64, lambda s: s.top_k),
    "min_p": (np.float32, lambda s: s.min_p),
    "repetition": (np.float32, lambda s: s.repetition_penalty),
    "presence": (np.float32, lambda s: s.presence_penalty),
    "frequency": (np.float32, lambda s: s.frequency_penalty),
    "seed": (np.uint64, lambda s: s.seed),
    "logprobs": (np.int64, lambda s: s.logprobs),
    "prompt_logprobs": (np.int64, lambda s: s.prompt_logprobs),
    "min_tokens": (np.int64, lambda s: s.min_tokens),
}


class SamplingTable:
    """Owns the sampling columns of all slots and the last selection made of them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(num_slots, kind) for name, (kind, _) in COLUMNS.items()
        }
        self._lists = [NO_LISTS] * num_slots
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.prompt_logprobs = self._columns["prompt_logprobs"]
        self._greedy = np.ones(num_slots, bool)
        self._selection: tuple[bytes, SamplingRows] | None = None

    def join(self, joins: Sequence[Join]) -> None:
        """Write the parameters of sequences that take a slot; whatever stood there is gone."""
        slots = np.array([join.slot for join in joins], np.int64)
        for name, (kind, read) in COLUMNS.items():
            self._columns[name][slots] = np.array([read(j.sampling) for j in joins], kind)
        self.num_prompt[slots] = [join.num_prompt_tokens for join in joins]
        for join in joins:
            self._lists[join.slot] = self._read_lists(join.sampling)
        column = self._columns
        top_k = column["top_k"]
        top_k[slots] = np.where(top_k[slots] >= self._vocab_size, 0, top_k[slots])
        best_only = (column["top_p"][slots] <= 0) | (top_k[slots] == 1)
        self._greedy[slots] = best_only | (column["temperature"][slots] < GREEDY_BELOW)
        self._selection = None

    def rows(self, slots: np.ndarray) -> SamplingRows:
        """Return the selection for rows in *slots*, int64 [n], in that order."""
        key = slots.tobytes()
        if self._selection is None or self._selection[0] != key:
            self._selection = (key, self._select(slots))
        return self._selection[1]

    # ------------------------------------------------------------------------------ selection

    def _select(self, slots: np.ndarray) -> SamplingRows:
        lists = [self._lists[slot] for slot in slots.tolist()]
        plain = all(entry is NO_LISTS for entry in lists)
        return SamplingRows(
            slots=self._tensor(slots),
            repetition=self._repetition(slots),
            output_penalty=self._output_penalty(slots),
            bias=None if plain else self._bias(lists),
            allowed=None if plain else self._allowed(lists),
            bad_words=None if plain else self._bad_words(slots, lists),
            early_ends=None if plain else self._early_ends(slots, lists),
            random=self._random(slots),
            reported=self._reported(slots),
        )

    def _repetition(self, slots: np.ndarray) -> RepetitionPenalty | None:
        factor = self._columns["repetition"][slots]
        rows = np.flatnonzero(factor != 1.0)
        if not rows.size:
            return None
        return RepetitionPenalty(self._tensor(rows), self._tensor(factor[rows]))

    def _output_penalty(self, slots: np.ndarray) -> OutputPenalty | None:
        presence, frequency = self._columns["presence"][slots], self._columns["frequency"][slots]
        rows = np.flatnonzero((presence != 0.0) | (frequency != 0.0))
        if not rows.size:
            return None
        columns = (rows, self.num_prompt[slots[rows]], presence[rows], frequency[rows])
        return OutputPenalty(*map(self._tensor, columns))

    def _bias(self, lists: list[SlotLists]) -> Entries | None:
        rows = np.repeat(np.arange(len(lists)), [entry.bias_ids.size for entry in lists])
        if not rows.size:
            return None
        ids = np.concatenate([entry.bias_ids for entry in lists])
        values = np.concatenate([entry.bias_values for entry in lists])
        return Entries(self._tensor(rows), self._tensor(ids), self._tensor(values))

    def _early_ends(self, slots: np.ndarray, lists: list[SlotLists]) -> Entries | None:
        rows = np.repeat(np.arange(len(lists)), [entry.early_ids.size for entry in lists])
        if not rows.size:
            return None
        ids = np.concatenate([entry.early_ids for entry in lists])
        lengths = self.num_prompt[slots] + self._columns["min_tokens"][slots]
        return Entries(self._tensor(rows), self._tensor(ids), self._tensor(lengths[rows]))

    def _allowed(self, lists: list[SlotLists]) -> AllowedIds | None:
        rows = [row for row, entry in enumerate(lists) if entry.allowed_ids is not None]
        if not rows:
            return None
        mask = np.zeros((len(rows), self._vocab_size), bool)
        for k, row in enumerate(rows):
            mask[k, lists[row].allowed_ids] = True
        return AllowedIds(self._tensor(np.array(rows)), self._tensor(mask))

    def _bad_words(self, slots: np.ndarray, lists: list[SlotLists]) -> BadWords | None:
        words = [word for entry in lists for word in entry.bad_words]
        if not words:
            return None
        rows = np.repeat(np.arange(len(lists)), [len(entry.bad_words) for entry in lists])
        sizes = np.array([word.size for word in words])
        ids = np.concatenate(words)
        word_of = np.repeat(np.arange(len(words)), sizes)
        back = np.cumsum(sizes)[word_of] - 1 - np.arange(ids.size)  # 0 is the word's last token
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
        rows = np.flatnonzero(~self._greedy[slots])
        if not rows.size:
            return None
        column = {name: values[slots[rows]] for name, values in self._columns.items()}
        top_k, is_cut = column["top_k"], (column["top_k"] > 0) | (column["top_p"] < 1.0)
        return RandomRows(
            rows=None if rows.size == slots.size else self._tensor(rows),
            seeds=self._tensor(column["seed"].view(np.int64)),
            temperature=self._tensor(column["temperature"]),
            min_p=self._tensor(column["min_p"]),
            top_k=self._tensor(np.maximum(top_k, 0)),
            top_p=self._tensor(column["top_p"]),
            plain=self._tensor(np.flatnonzero(~is_cut)),
            cut=self._tensor(np.flatnonzero(is_cut)),
            any_min_p=bool((column["min_p"] > 0).any()),
            largest_top_k=int(top_k.max(initial=0)),
            open_ended=bool((top_k[is_cut] <= 0).any()),
        )

    def _reported(self, slots: np.ndarray) -> ReportedRows | None:
        wanted = np.minimum(self._columns["logprobs"][slots], self._vocab_size)
        rows = np.flatnonzero(wanted >= 0)
        if not rows.size:
            return None
        counts = wanted[rows] + 1
        return ReportedRows(self._tensor(rows), self._tensor(counts), int(counts.max()))

    # ------------------------------------------------------------------------------ reading

    def _read_lists(self, spec: SamplingSpec) -> SlotLists:
        early = spec.banned_until_min if spec.min_tokens > 0 else b""
        if not (spec.bias_ids or spec.allowed_ids or early or spec.bad_words):
            return NO_LISTS
        bias_ids, inside = self._ids(spec.bias_ids, "logit_bias")
        words = [self._ids(word, "bad_words") for word in spec.bad_words if word]
        return SlotLists(
            bias_ids=bias_ids,
            bias_values=np.frombuffer(spec.bias_values, np.float32)[inside],
            allowed_ids=self._ids(spec.allowed_ids, "allowed_token_ids")[0]
            if spec.allowed_ids
            else None,
            early_ids=self._ids(early, "stop_token_ids")[0],
            bad_words=[ids for ids, known in words if known.all()],
        )

    def _ids(self, column: bytes, field: str) -> tuple[Ints, np.ndarray]:
        """Return the ids of an int32 *column* that are in the vocabulary, and which those are."""
        ids = np.frombuffer(column, np.int32).astype(np.int64)
        inside = (ids >= 0) & (ids < self._vocab_size)
        if not inside.all():
            log.error("%s with ids outside the vocabulary reached the worker: dropped", field)
        return ids[inside], inside

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
