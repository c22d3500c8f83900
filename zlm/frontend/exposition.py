"""The text of /metrics: the count pages of all processes, added up, in Prometheus' format.

Pure: pages in, text out. So any front end tells the same, and the sums never go down (see
``zlm.process.counts``). Names are vLLM's where both have the
thing; our own start with ``zlm:``.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zlm.config import Resolved
from zlm.metrics import REASONS, EngineStats, engine_stats, histogram_buckets
from zlm.process.counts import STARTS, Values

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
ENGINE = "0"
_LABELS = ("model_name", "engine")

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Pages = Mapping[str, Mapping[int, Values]]  # by role, then by index

# Field of EngineStats → name, and what it is.
_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences that are being computed"),
    "num_waiting": ("vllm:num_requests_waiting", "Sequences that wait for room"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1"),
}
_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of prompts that were started"),
    "prompt_tokens_cached": ("vllm:prompt_tokens_cached", "Of those, found in the prefix cache"),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated"),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache"),
    "preemptions": ("vllm:num_preemptions", "Sequences preempted for lack of room"),
    "steps": ("zlm:engine_steps", "Steps of the engine core"),
    "run_ahead_stalls": (
        "zlm:run_ahead_stalls",
        "Steps that ended with no other sent ahead although work waited",
    ),
}
# No drafts are proposed in this version: dashboards find the names, and zeros.
_SPECULATION = {
    "vllm:spec_decode_num_drafts": "Drafts that were verified",
    "vllm:spec_decode_num_draft_tokens": "Tokens of drafts",
    "vllm:spec_decode_num_accepted_tokens": "Tokens of drafts that were accepted",
}
_HISTOGRAM_TEXTS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "inter_token_latency_seconds": "Between two tokens of a sequence",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a sequence",
    "e2e_request_latency_seconds": "From a request's arrival to the end of a sequence",
    "request_queue_time_seconds": "From a request's arrival to its first step",
    "request_prefill_time_seconds": "From its first step to its first token",
    "request_decode_time_seconds": "From its first token to its last",
    "request_prompt_tokens": "Tokens of a prompt",
    "request_generation_tokens": "Tokens generated for a sequence",
    "request_params_max_tokens": "The most tokens that were asked for",
    "request_params_n": "Samples that were asked for",
    "iteration_tokens_total": "Tokens computed in a step",
    "zlm:engine_step_seconds": "Time that the worker took for a step",
}


class Exposition(Collector):
    """The families of one served model."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self._labels = (resolved.served_names[0], ENGINE)
        self._pages: Pages = {}
        self._memory: Mapping[str, int] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self, pages: Pages, memory: Mapping[str, int]) -> bytes:
        """Return the text for what *pages* say, and the *memory* in bytes of each process."""
        self._pages, self._memory = pages, memory
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every family. Called by the registry."""
        stats = engine_stats(self._pages.get("engine", {}).get(0, {}))
        yield from self._engine(stats)
        yield from self._histograms(stats)
        yield self._cache_config(stats)
        yield from self._absent()
        yield from self._front_ends()
        yield from self._processes(stats)

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        for field, told in _GAUGES.items():
            yield self._one(GaugeMetricFamily, *told, getattr(stats, field))
        for field, told in _COUNTERS.items():
            yield self._one(CounterMetricFamily, *told, getattr(stats, field))

    def _one(self, kind: type[Family], name: str, text: str, value: float) -> Family:
        family = kind(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        for name, bounds in histogram_buckets(self._resolved.max_model_len).items():
            empty = ([0] * (len(bounds) + 1), 0.0)
            counts, total = stats.histograms.get(name, empty)
            ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
            full_name = name if ":" in name else f"vllm:{name}"
            family = HistogramMetricFamily(full_name, _HISTOGRAM_TEXTS[name], labels=_LABELS)
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family.add_metric(self._labels, buckets=buckets, sum_value=total)
            yield family

    def _cache_config(self, stats: EngineStats) -> Metric:
        cache = self._resolved.config.cache
        facts = {
            "block_size": cache.block_size_tokens,
            "num_gpu_blocks": stats.num_blocks,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "engine": ENGINE,
        }
        return _info("vllm:cache_config_info", "How the KV cache is laid out", facts)

    def _absent(self) -> Iterator[Metric]:
        """Yield what vLLM's dashboards read and this version has none of."""
        for name, text in _SPECULATION.items():
            yield self._one(CounterMetricFamily, name, text, 0)
        facts = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        yield _info("vllm:lora_requests_info", "Adapters in use: none are served", facts)

    # ------------------------------------------------------------------- sums of front ends

    def _front_ends(self) -> Iterator[Metric]:
        counted = summed(self._pages.get("frontend", {}))
        success = CounterMetricFamily(
            "vllm:request_success",
            "Sequences that are over, by why",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason in REASONS:
            success.add_metric((*self._labels, reason), counted.get(("finished", reason), 0.0))
        yield success
        yield _by_labels(
            CounterMetricFamily(
                "http_requests",
                "HTTP requests by route and status; 499: the client went away",
                labels=("route", "method", "status"),
            ),
            "http",
            counted,
        )
        yield _by_labels(
            CounterMetricFamily(
                "zlm:requests_rejected", "Requests that were refused", labels=("reason",)
            ),
            "rejected",
            counted,
        )

    # ------------------------------------------------------------------- processes

    def _processes(self, stats: EngineStats) -> Iterator[Metric]:
        starts = self._pages.get("engine", {}).get(0, {}).get(STARTS, [1.0])[0]
        text = "Engine cores that took the place of another"
        yield self._one(CounterMetricFamily, "zlm:engine_restarts", text, max(0.0, starts - 1.0))
        queues = GaugeMetricFamily(
            "zlm:queue_requests",
            "What is open or waits at a process: requests at front ends and tokenizers, waiting "
            "sequences at the engine, steps at the worker",
            labels=("process",),
        )
        queued = summed(self._pages.get("frontend", {}))
        queues = _by_labels(queues, "queue", queued)
        queues.add_metric(("engine 0",), stats.num_waiting)
        queues.add_metric(("worker 0",), stats.steps_in_flight)
        yield queues
        memory = GaugeMetricFamily(
            "zlm:process_memory_bytes", "Resident memory of a process", labels=("process",)
        )
        for process, size in sorted(self._memory.items()):
            memory.add_metric((process,), size)
        yield memory


def summed(pages: Mapping[int, Values]) -> dict[tuple[str, ...], float]:
    """Return the sum of each single-celled entry over *pages*, its name split into parts."""
    sums: dict[tuple[str, ...], float] = {}
    for values in pages.values():
        for name, cells in values.items():
            parts = tuple(name.split("\t"))
            sums[parts] = sums.get(parts, 0.0) + cells[0]
    return sums


def _info(name: str, text: str, facts: Mapping[str, object]) -> Metric:
    """Return the family of one metric that tells *facts* in its labels."""
    family = GaugeMetricFamily(name, text, labels=tuple(facts))
    family.add_metric([str(value) for value in facts.values()], 1)
    return family


def _by_labels(family: Family, entry: str, counted: Mapping[tuple[str, ...], float]) -> Family:
    """Add to *family* every entry of that name, labelled by what follows the name."""
    for (name, *labels), count in sorted(counted.items()):
        if name == entry:
            family.add_metric(labels, count)
    return family
