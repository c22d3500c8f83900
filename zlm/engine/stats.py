"""What the engine core counts: events in, an ``EngineStats`` message out.

Owns counters and histograms; they only ever grow. Knows no clock: times are arguments. Latencies
and generated tokens are counted by sequence; prompts (their tokens, cache hits and n) once a
prompt, however many samples were asked for.
"""

from collections.abc import Sequence as Row

import numpy as np
import numpy.typing as npt

from zlm.engine.request import Sequence
from zlm.messages import (
    FINISH_ABORT,
    FINISH_EOS,
    FINISH_GRAMMAR,
    FINISH_LENGTH,
    FINISH_STOP_ID,
    EngineStats,
)
from zlm.metrics import Histogram, histogram_buckets

ERROR = -1  # beside the finish codes: the sequence ended in an error

REASONS = {
    FINISH_EOS: "stop",
    FINISH_STOP_ID: "stop",
    FINISH_GRAMMAR: "stop",
    FINISH_LENGTH: "length",
    FINISH_ABORT: "abort",
    ERROR: "error",
}


class Statistics:
    """Counters and histograms of one engine core."""

    def __init__(self, max_model_len: int) -> None:
        self._histograms = {
            name: Histogram(bounds) for name, bounds in histogram_buckets(max_model_len).items()
        }
        self._gaps = self._histograms["inter_token_latency_seconds"]
        self._gap_bounds = np.array(self._gaps.bounds)
        self._iteration_tokens = self._histograms["iteration_tokens_total"]
        self._success = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.steps = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.preemptions = 0

    def submitted(self, n: int, max_tokens: int) -> None:
        """Count a prompt that was taken in."""
        self._observe("request_params_n", n)
        self._observe("request_params_max_tokens", max_tokens)

    def refused(self, n: int) -> None:
        """Count *n* sequences that can never run."""
        self._success["error"] += n

    def planned(self, num_tokens: int) -> None:
        """Count a step that computes *num_tokens* tokens."""
        self.steps += 1
        self._iteration_tokens.observe(num_tokens)

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
        buckets = np.searchsorted(self._gap_bounds, gaps)
        counts = self._gaps.counts
        for bucket, times in enumerate(np.bincount(buckets).tolist()):
            counts[bucket] += times
        self._gaps.total += float(gaps.sum())

    def finished(self, sequence: Sequence, code: int, now: float) -> None:
        """Count the end of *sequence*; *code* is a finish code or ERROR."""
        self._success[REASONS[code]] += 1
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

    def message(
        self,
        *,
        num_running: int,
        num_waiting: int,
        kv_usage: float,
        num_blocks: Row[int],
        block_size: int,
    ) -> EngineStats:
        """Return the counters with the gauges of the moment; *num_blocks* is by KV group."""
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
            num_blocks=max(num_blocks, default=0),
            block_size_tokens=block_size,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            prompt_tokens_cached=self.prompt_tokens_cached,
            generation_tokens=self.generation_tokens,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            preemptions=self.preemptions,
            success=dict(self._success),
            histograms={
                name: (list(histogram.counts), histogram.total)
                for name, histogram in self._histograms.items()
            },
        )

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
