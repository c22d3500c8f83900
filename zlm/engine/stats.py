"""What the engine core counts: events in, cells of its count page out.

Owns the page's counters and histograms; they only ever grow, and go on where a former engine core
of the same server stopped. Knows no clock: times are arguments. Latencies and generated tokens are
counted by sequence; prompts (their tokens, cache hits and n) once a prompt, however many samples
were asked for.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from zlm.engine.request import Sequence
from zlm.messages import (
    FINISH_ABORT,
    FINISH_EOS,
    FINISH_GRAMMAR,
    FINISH_LENGTH,
    FINISH_STOP_ID,
)
from zlm.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAM_PREFIX,
    REASONS,
    STEP_TIME,
    SUCCESS,
    EngineStats,
    Histogram,
    engine_stats,
    histogram_buckets,
)
from zlm.process.counts import CountPage

ERROR = -1  # beside the finish codes: the sequence ended in an error

_ENDS = {
    FINISH_EOS: "stop",
    FINISH_STOP_ID: "stop",
    FINISH_GRAMMAR: "stop",
    FINISH_LENGTH: "length",
    FINISH_ABORT: "abort",
    ERROR: "error",
}
_END_CELLS = {code: REASONS.index(reason) for code, reason in _ENDS.items()}


def clear_gauges(page: CountPage) -> None:
    """Let *page* tell that nothing runs or waits: whoever it was that ran it is gone."""
    for name in GAUGES:
        page.cells(name)[0] = 0.0


class Counter:
    """An attribute of ``Statistics`` whose value is kept in a cell of the page."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, statistics: "Statistics", owner: Any = None) -> int:
        return int(statistics.cells[self._name][0])

    def __set__(self, statistics: "Statistics", value: int) -> None:
        statistics.cells[self._name][0] = value


class Statistics:
    """Counters, histograms and gauges of one engine core."""

    steps = Counter()
    run_ahead_stalls = Counter()  # results after which the worker had nothing, though work waits
    prompt_tokens = Counter()
    prompt_tokens_cached = Counter()
    generation_tokens = Counter()
    prefix_cache_queries = Counter()
    prefix_cache_hits = Counter()
    preemptions = Counter()

    def __init__(self, max_model_len: int, page: CountPage | None = None) -> None:
        """Count in *page*; without one, for this core alone."""
        self._max_model_len = max_model_len
        self.count_in(page or CountPage())

    def count_in(self, page: CountPage) -> None:
        """Count in *page* from now on; what was counted elsewhere is forgotten."""
        self._page = page
        self.cells = {name: self._page.cells(name) for name in (*COUNTERS, *GAUGES)}
        self._histograms = {
            name: Histogram(bounds, self._page.cells(HISTOGRAM_PREFIX + name, len(bounds) + 2))
            for name, bounds in histogram_buckets(self._max_model_len).items()
        }
        self._gaps = self._histograms["inter_token_latency_seconds"]
        self._gap_bounds = np.array(self._gaps.bounds)
        self._iteration_tokens = self._histograms["iteration_tokens_total"]
        self._step_seconds = self._histograms[STEP_TIME]
        self._ends = self._page.cells(SUCCESS, len(REASONS))

    def submitted(self, n: int, max_tokens: int) -> None:
        """Count a prompt that was taken in."""
        self._observe("request_params_n", n)
        self._observe("request_params_max_tokens", max_tokens)

    def refused(self, n: int) -> None:
        """Count *n* sequences that can never run."""
        self._ends[_END_CELLS[ERROR]] += n

    def planned(self, num_tokens: int) -> None:
        """Count a step that computes *num_tokens* tokens."""
        self.steps += 1
        self._iteration_tokens.observe(num_tokens)

    def computed(self, seconds: float, *, stalled: bool) -> None:
        """Count a step that took the worker *seconds*; *stalled*: it has none to go on with."""
        self._step_seconds.observe(seconds)
        if stalled:
            self.run_ahead_stalls += 1

    def looked_up(self, num_tokens: int, num_hits: int) -> None:
        """Count a prefix-cache look-up of *num_tokens* tokens that found *num_hits*."""
        self.prefix_cache_queries += num_tokens
        self.prefix_cache_hits += num_hits

    def started(self, sequence: Sequence, now: float) -> None:
        """Count the first time that *sequence* is scheduled."""
        self._observe("request_queue_time_seconds", now - sequence.arrival)
        if sequence.counts_prompt:
            self._observe("request_prompt_tokens", sequence.num_prompt)
            self.prompt_tokens += sequence.num_prompt
            self.prompt_tokens_cached += sequence.num_cached

    def first_token(self, sequence: Sequence, now: float) -> None:
        """Count the first token of *sequence*."""
        self._observe("time_to_first_token_seconds", now - sequence.arrival)
        self._observe("request_prefill_time_seconds", now - sequence.started_at)

    def next_token(self, gap: float) -> None:
        """Count the seconds between two tokens of a sequence."""
        self._gaps.observe(gap)

    def next_tokens(self, gaps: npt.NDArray[np.float64]) -> None:
        """Count the seconds between two tokens of many sequences."""
        if not len(gaps):
            return
        cells = self._gaps.cells
        times = np.bincount(np.searchsorted(self._gap_bounds, gaps)).tolist()
        for bucket, count in enumerate(times):
            if count:
                cells[bucket] += count
        self._gaps.add_sum(float(gaps.sum()))

    def finished(self, sequence: Sequence, code: int, now: float) -> None:
        """Count the end of *sequence*; *code* is a finish code or ERROR."""
        self._ends[_END_CELLS[code]] += 1
        if code == ERROR:
            return
        generated = len(sequence.tokens) - sequence.num_prompt
        self._observe("e2e_request_latency_seconds", now - sequence.arrival)
        self._observe("request_generation_tokens", generated)
        if generated:
            decoding = sequence.last_token_at - sequence.first_token_at
            self._observe("request_decode_time_seconds", decoding)
            if generated > 1:
                per_token = decoding / (generated - 1)
                self._observe("request_time_per_output_token_seconds", per_token)

    def show(self, **gauges: float) -> None:
        """Put the gauges of the moment, named as in ``zlm.metrics.GAUGES``, into the page."""
        for name, value in gauges.items():
            self.cells[name][0] = value

    def value(self) -> EngineStats:
        """Return what the page says now."""
        return engine_stats(self._page.values())

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
