"""The names, labels and buckets of what /metrics shows (vLLM's names, so dashboards carry over).

Pure tables: the engine core counts by them, the front end renders by them. Imports nothing of zlm.
"""

from bisect import bisect_left

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
STEP_TOKENS = (1, *(2**k for k in range(3, 15)))
SAMPLES = (1, 2, 5, 10, 20)


def one_two_five(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to and including the last that is at most *most*."""
    buckets = []
    decade = 1
    while decade <= most:
        buckets += [m * decade for m in (1, 2, 5) if m * decade <= most]
        decade *= 10
    return tuple(buckets)


def histogram_buckets(max_model_len: int) -> dict[str, tuple[float, ...]]:
    """Return the upper bounds of each histogram's buckets, by its name without the prefix."""
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
    }


class Histogram:
    """Counts per bucket; the last count is of values over the last bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count *value* *times* times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
