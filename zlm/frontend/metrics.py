"""GET /metrics: the engine core's counts and the front end's own, as Prometheus text.

Holds the last EngineStats and the count of answers; renders only when asked. Names are vLLM's where
both have the thing, so that its dashboards carry over; our own start with ``zlm:``.
"""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zlm.config import Resolved
from zlm.messages import EngineStats
from zlm.metrics import histogram_buckets

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
ENGINE = "0"
_LABELS = ("model_name", "engine")

# Field of EngineStats → name without the prefix, and what it is.
_GAUGES = {
    "num_running": ("num_requests_running", "Sequences that are being computed"),
    "num_waiting": ("num_requests_waiting", "Sequences that wait for room"),
    "kv_usage": ("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1"),
}
_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of finished prefills"),
    "prompt_tokens_cached": ("vllm:prompt_tokens_cached", "Of those, found in the prefix cache"),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated"),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache"),
    "preemptions": ("vllm:num_preemptions", "Sequences preempted for lack of room"),
    "steps": ("zlm:engine_steps", "Steps of the engine core"),
}


class FrontendMetrics(Collector):
    """What one front end can tell. *index* is its number: its own counts are told apart by it."""

    def __init__(self, index: int) -> None:
        self._index = str(index)
        self._answers: dict[tuple[str, str, int], int] = {}
        self._stats = EngineStats()
        self._resolved: Resolved | None = None
        self._open = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def configure(self, resolved: Resolved) -> None:
        """Take the model whose name labels the engine's metrics."""
        self._resolved = resolved

    def take_stats(self, stats: EngineStats) -> None:
        """Keep the engine core's newest counts."""
        self._stats = stats

    def count_answer(self, route: str, method: str, status: int) -> None:
        """Count one answer."""
        key = (route, method, status)
        self._answers[key] = self._answers.get(key, 0) + 1

    def render(self, num_open: int) -> bytes:
        """Return the text; *num_open* requests are open at this moment."""
        self._open = num_open
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every family. Called by the registry."""
        yield from self._own()
        if self._resolved is not None:
            yield from self._engine(self._resolved)
            yield from self._histograms(self._resolved)

    def _own(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "http_requests",
            "HTTP requests by route and status; 499: the client went away",
            labels=("route", "method", "status", "frontend"),
        )
        for (route, method, status), count in self._answers.items():
            answers.add_metric((route, method, str(status), self._index), count)
        yield answers
        open_requests = GaugeMetricFamily(
            "zlm:frontend_open_requests",
            "Requests that a front end waits for an answer to",
            labels=("frontend",),
        )
        open_requests.add_metric((self._index,), self._open)
        yield open_requests

    def _engine(self, resolved: Resolved) -> Iterator[Metric]:
        labels = (resolved.served_names[0], ENGINE)
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(labels, getattr(self._stats, field))
            yield gauge
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(labels, getattr(self._stats, field))
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success",
            "Sequences that are over, by why",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric((*labels, reason), self._stats.success.get(reason, 0))
        yield success
        yield self._cache_config(resolved)

    def _cache_config(self, resolved: Resolved) -> Metric:
        cache = resolved.config.cache
        facts = {
            "block_size": resolved.config.cache.block_size_tokens,
            "num_gpu_blocks": self._stats.num_blocks,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "engine": ENGINE,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is laid out", labels=tuple(facts)
        )
        family.add_metric([str(value) for value in facts.values()], 1)
        return family

    def _histograms(self, resolved: Resolved) -> Iterator[Metric]:
        labels = (resolved.served_names[0], ENGINE)
        for name, bounds in histogram_buckets(resolved.max_model_len).items():
            empty = ([0] * (len(bounds) + 1), 0.0)
            counts, total = self._stats.histograms.get(name, empty)
            ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
            family = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=total)
            yield family
