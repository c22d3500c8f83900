"""Random traffic for a runner, as a scheduler would shape it: prompts in chunks beside decodes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from worker_steps import join

from zlm.messages import Join

Row = tuple[int, int, int, int]  # slot, start, count, sample

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {},
    {"temperature": 1.1, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.7, "repetition_penalty": 1.2},
]


@dataclass
class _Sequence:
    slot: int
    length: int  # tokens known
    computed: int
    end: int  # tokens at which it has finished


class Traffic:
    """Keeps up to *max_num_seqs* sequences running; a step has at most *budget* tokens."""

    def __init__(
        self, vocab: int, max_num_seqs: int, *, budget: int, longest: int, seed: int
    ) -> None:
        """*longest*: most tokens of an answer."""
        self._vocab = vocab
        self._budget = budget
        self._longest = longest
        self._random = np.random.default_rng(seed)
        self._running: list[_Sequence] = []
        self._free = list(range(max_num_seqs))
        self._started = 0
        self.finished = 0

    def steps(self, count: int) -> Iterator[tuple[list[Row], list[Join]]]:
        """Yield the rows of each step and the sequences that join with it."""
        for _ in range(count):
            yield self._step()

    def drew(self, rows: list[Row], tokens: list[int]) -> None:
        """Take note of a step's samples; sequences that are long enough leave their slots."""
        sampled = [slot for slot, _, _, sample in rows if sample]
        assert len(sampled) == len(tokens)
        by_slot = {sequence.slot: sequence for sequence in self._running}
        for slot, _, count, sample in rows:
            by_slot[slot].computed += count
            by_slot[slot].length += sample
        for sequence in [each for each in self._running if each.length >= each.end]:
            self._running.remove(sequence)
            self._free.append(sequence.slot)
            self.finished += 1

    def _step(self) -> tuple[list[Row], list[Join]]:
        rows, joins, left = [], [], self._budget
        waiting = [each for each in self._running if each.length - each.computed > 1]
        for each in self._running:
            if each.length - each.computed == 1:
                rows.append((each.slot, each.computed, 1, 1))
                left -= 1
        # Some steps take no newcomer, so that decodes run alone.
        takes = self._random.random() < 0.6 or not rows
        while takes and self._free and left > sum(each.length for each in waiting) + 1:
            joined, sequence = self._newcomer()
            joins.append(joined)
            waiting.append(sequence)
        for each in waiting:
            count = min(each.length - each.computed, left)
            if count:
                last = each.computed + count == each.length
                rows.append((each.slot, each.computed, count, int(last)))
                left -= count
        return rows, joins

    def _newcomer(self) -> tuple[Join, _Sequence]:
        slot, number = self._free.pop(0), self._started
        self._started += 1
        short = self._random.random() < 0.7
        length = int(self._random.integers(1, 12) if short else self._random.integers(12, 130))
        answer = int(self._random.integers(1, self._longest + 1))
        tokens = self._random.integers(0, self._vocab, length).tolist()
        sequence = _Sequence(slot, length, 0, length + answer)
        self._running.append(sequence)
        return join(slot, tokens, seed=number, **SETTINGS[number % len(SETTINGS)]), sequence
