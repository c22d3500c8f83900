"""Sampling parameters of every slot on the host, and the client lists of rows, strung together.

``SamplingSlots`` owns one column a parameter, one entry a slot, written when a sequence joins. It
is plain numpy: ``zlm.worker.sampling_table`` makes of it what the CPU sampler reads,
``zlm.worker.gpu_sampler`` what the kernels read.

Client lists (biases, allowed ids, early ends, bad words) are ragged: they are kept a slot at a
time and strung together into flat columns when rows are selected. Ids are checked long before
they get here; one outside the vocabulary is dropped, so that it can never index out of bounds.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zlm.messages import Join, SamplingSpec
from zlm.sampling_params import GREEDY_BELOW

log = logging.getLogger("zlm.worker")

Ints = np.ndarray  # int64 [m]


@dataclass(frozen=True, slots=True)
class SlotLists:
    """The ragged lists of one slot."""

    bias_ids: Ints
    bias_values: np.ndarray  # float32
    allowed_ids: Ints | None
    early_ids: Ints
    bad_words: list[Ints]  # each word's ids


@dataclass(frozen=True, slots=True)
class FlatEntries:
    """Flat (row, token, value) entries: ``rows`` and ``ids`` int64 [e], ``values`` [e]."""

    rows: Ints
    ids: Ints
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class FlatWords:
    """Bad words, flat: word w of row ``rows[w]`` is ``ids[starts[w] : starts[w + 1]]``, int64."""

    rows: Ints  # [w]
    starts: Ints  # [w + 1]
    ids: Ints


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

UNUSED = SamplingSpec(seed=0, temperature=0.0)  # what a slot that nobody has taken says


class SamplingSlots:
    """Owns the sampling columns and lists of all slots; others read them."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.columns: dict[str, np.ndarray] = {
            name: np.full(num_slots, read(UNUSED), kind) for name, (kind, read) in COLUMNS.items()
        }
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.greedy = np.ones(num_slots, bool)  # the best token, whatever the temperature says
        self.lists = [NO_LISTS] * num_slots

    def join(self, joins: Sequence[Join]) -> Ints:
        """Write the parameters of sequences that take a slot; return the slots, int64 [n].

        Whatever stood there is gone. A top_k that cuts nothing is written as 0.
        """
        slots = np.array([join.slot for join in joins], np.int64)
        column = self.columns
        for name, (kind, read) in COLUMNS.items():
            column[name][slots] = np.array([read(j.sampling) for j in joins], kind)
        self.num_prompt[slots] = [join.num_prompt_tokens for join in joins]
        for join in joins:
            self.lists[join.slot] = self._read_lists(join.sampling)
        top_k = column["top_k"][slots]
        top_k = np.where((top_k < 0) | (top_k >= self.vocab_size), 0, top_k)
        column["top_k"][slots] = top_k
        best_only = (column["top_p"][slots] <= 0) | (top_k == 1)
        self.greedy[slots] = best_only | (column["temperature"][slots] < GREEDY_BELOW)
        return slots

    def lists_of(self, slots: Ints) -> list[SlotLists] | None:
        """Return the lists of each of *slots*; None when no slot has any."""
        lists = [self.lists[slot] for slot in slots.tolist()]
        return None if all(entry is NO_LISTS for entry in lists) else lists

    def penalised(self, slots: Ints) -> np.ndarray:
        """Return which of *slots* have a penalty, bool [n]."""
        column = self.columns
        changed = (column["presence"][slots] != 0.0) | (column["frequency"][slots] != 0.0)
        return changed | (column["repetition"][slots] != 1.0)

    def early_ends(self, slots: Ints, lists: list[SlotLists]) -> FlatEntries | None:
        """Ids that may not be drawn while the row has fewer than ``values`` tokens (int64)."""
        rows = np.repeat(np.arange(len(lists)), [entry.early_ids.size for entry in lists])
        if not rows.size:
            return None
        ids = np.concatenate([entry.early_ids for entry in lists])
        lengths = self.num_prompt[slots] + self.columns["min_tokens"][slots]
        return FlatEntries(rows, ids, lengths[rows])

    def reported(self, slots: Ints) -> tuple[Ints, Ints] | None:
        """Return the rows that report log-probabilities and how many entries each, itself one."""
        wanted = np.minimum(self.columns["logprobs"][slots], self.vocab_size)
        rows = np.flatnonzero(wanted >= 0)
        return (rows, wanted[rows] + 1) if rows.size else None

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
        inside = (ids >= 0) & (ids < self.vocab_size)
        if not inside.all():
            log.error("%s with ids outside the vocabulary reached the worker: dropped", field)
        return ids[inside], inside


def flat_biases(lists: list[SlotLists]) -> FlatEntries | None:
    """String the biases of rows together; ``values`` float32. None when there are none."""
    rows = np.repeat(np.arange(len(lists)), [entry.bias_ids.size for entry in lists])
    if not rows.size:
        return None
    ids = np.concatenate([entry.bias_ids for entry in lists])
    values = np.concatenate([entry.bias_values for entry in lists])
    return FlatEntries(rows, ids, values)


def flat_words(lists: list[SlotLists]) -> FlatWords | None:
    """String the bad words of rows together; None when there are none."""
    words = [word for entry in lists for word in entry.bad_words]
    if not words:
        return None
    rows = np.repeat(np.arange(len(lists)), [len(entry.bad_words) for entry in lists])
    starts = np.cumsum([0, *(word.size for word in words)])
    return FlatWords(rows, starts, np.concatenate(words))
