"""The names and buckets of what /metrics shows, and the engine core's counts as a value.

Pure tables: the engine core counts by them, the front end renders by them (vLLM's names where both
have the thing, so that its dashboards carry over). Imports nothing of zlm.
"""

from bisect import bisect_left
from collections.abc import Mapping

import msgspec

LATENCY_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
STEP_TOKENS = (1, *(2**k for k in range(3, 15)))
SAMPLES = (1, 2, 5, 10, 20)

STEP_TIME = "zlm:engine_step_seconds"

# Why a sequence is over, as vllm:request_success_total tells it.
REASONS = ("stop", "length", "abort", "error")


def one_two_five(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to and including the last that is at most *most*."""
    buckets = []
    decade = 1
    while decade <= most:
        buckets += [m * decade for m in (1, 2, 5) if m * decade <= most]
        decade *= 10
    return tuple(buckets)


def histogram_buckets(max_model_len: int) -> dict[str, tuple[float, ...]]:
    """Return the upper bounds of each histogram's buckets, by its name without ``vllm:``."""
    tokens = one_two_five(max_model_len)
    return {
        "time_to_first_token_seconds": FIRST_TOKEN_SECONDS,
        "inter_token_latency_seconds": TOKEN_GAP_SECONDS,
        "request_time_per_output_token_seconds": TOKEN_GAP_SECONDS,
        "e2e_request_latency_seconds": LATENCY_SECONDS,
        "request_queue_time_seconds": LATENCY_SECONDS,
        "request_prefill_time_seconds": LATENCY_SECONDS,
        "request_decode_time_seconds": LATENCY_SECONDS,
        "request_prompt_tokens": tokens,
        "request_generation_tokens": tokens,
        "request_params_max_tokens": tokens,
        "request_params_n": SAMPLES,
        "iteration_tokens_total": STEP_TOKENS,
        STEP_TIME: STEP_SECONDS,
    }


class Histogram:
    """Counts per bucket (the last is of values over the last bound), and the sum of all values.

    They are kept in *cells*, two more than there are *bounds*, the sum at the end.
    """

    def __init__(self, bounds: tuple[float, ...], cells: "memoryview[float]") -> None:
        assert len(cells) == len(bounds) + 2, "a count for each bucket, the rest, and the sum"
        self.bounds = bounds
        self.cells = cells
        self._sum = len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        """Count *value* *times* times."""
        self.cells[bisect_left(self.bounds, value)] += times
        self.cells[self._sum] += value * times

    def add_sum(self, value: float) -> None:
        """Add to the sum alone: the buckets were counted otherwise."""
        self.cells[self._sum] += value


class EngineStats(msgspec.Struct, frozen=True):
    """What the engine core has counted since the server started, and gauges of the moment.

    Counters only ever grow. Histograms are the counts per bucket and over the last one, and a sum.
    """

    num_running: int = 0  # sequences that are being computed
    num_waiting: int = 0  # sequences that wait for room
    kv_usage: float = 0.0  # 0..1, the fullest group
    num_blocks: int = 0
    block_size_tokens: int = 0
    steps_in_flight: int = 0
    steps: int = 0
    run_ahead_stalls: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    preemptions: int = 0
    success: dict[str, int] = {}  # by REASONS; here the client's stop strings count as aborts
    histograms: dict[str, tuple[list[int], float]] = {}


GAUGES = (
    "num_running", "num_waiting", "kv_usage", "num_blocks", "block_size_tokens", "steps_in_flight",
)  # fmt: skip
COUNTERS = (
    "steps", "run_ahead_stalls", "prompt_tokens", "prompt_tokens_cached", "generation_tokens",
    "prefix_cache_queries", "prefix_cache_hits", "preemptions",
)  # fmt: skip
SUCCESS = "success"  # the cells are in the order of REASONS
HISTOGRAM_PREFIX = "histogram "


def engine_stats(values: Mapping[str, list[float]]) -> EngineStats:
    """Return the cells of an engine core's count page as a value; *values* may be empty."""
    known: dict[str, float] = {
        name: values[name][0] for name in (*GAUGES, *COUNTERS) if name in values
    }
    kv_usage = known.pop("kv_usage", 0.0)
    histograms = {
        name.removeprefix(HISTOGRAM_PREFIX): ([int(cell) for cell in cells[:-1]], cells[-1])
        for name, cells in values.items()
        if name.startswith(HISTOGRAM_PREFIX)
    }
    ends = values.get(SUCCESS, [0.0] * len(REASONS))
    return EngineStats(
        **{name: int(value) for name, value in known.items()},
        kv_usage=kv_usage,
        success={reason: int(count) for reason, count in zip(REASONS, ends, strict=True)},
        histograms=histograms,
    )
