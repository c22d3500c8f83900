"""What the page's dashboard shows, from the count pages of all processes. Pure.

``about`` is what stays, ``Moment`` what moves: the sums that /metrics tells, at one time, and how
fast they have grown since another.
"""

from dataclasses import dataclass
from typing import Any

from zlm import __version__
from zlm.config import Resolved
from zlm.frontend.exposition import Pages, summed
from zlm.metrics import REASONS, EngineStats, engine_stats, histogram_buckets
from zlm.process.counts import STARTS

# Histograms that are shown, by what the page calls them.
HISTOGRAMS = {
    "first": "time_to_first_token_seconds",
    "gap": "inter_token_latency_seconds",
    "whole": "e2e_request_latency_seconds",
}
RATED = ("prompt_tokens", "generation_tokens", "steps", "finished", "queries", "hits")


def about(resolved: Resolved, memory: Any, start: Any) -> dict[str, Any]:
    """Return what is served, how; *memory* and *start* are the notes of these names."""
    config, buckets = resolved.config, histogram_buckets(resolved.max_model_len)
    return {
        "version": __version__,
        "models": resolved.served_names,
        "architecture": resolved.spec.architecture,
        "device": resolved.device,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "front_ends": resolved.num_front_ends,
        "tokenizers": resolved.num_tokenizers,
        "prefix_caching": config.cache.enable_prefix_caching,
        "bounds": {name: buckets[histogram] for name, histogram in HISTOGRAMS.items()},
        "memory": memory,
        "start": start,
    }


@dataclass(frozen=True, slots=True)
class Moment:
    """The counts of all processes at one time."""

    at: float  # time.monotonic(), seconds
    stats: EngineStats
    finished: dict[str, float]  # sequences that are over, by REASONS
    rejected: float
    open_requests: float
    engine_starts: float

    @classmethod
    def of(cls, pages: Pages, at: float) -> "Moment":
        """Return what *pages*, read at *at*, say."""
        engine = pages.get("engine", {}).get(0, {})
        sums = summed(pages.get("frontend", {}))
        return cls(
            at=at,
            stats=engine_stats(engine),
            finished={reason: sums.get(("finished", reason), 0.0) for reason in REASONS},
            rejected=sum(count for name, count in sums.items() if name[0] == "rejected"),
            open_requests=sum(
                count
                for name, count in sums.items()
                if name[0] == "queue" and name[1].startswith("frontend")
            ),
            engine_starts=engine.get(STARTS, [1.0])[0],
        )

    def counters(self) -> dict[str, float]:
        """Return what only grows."""
        stats = self.stats
        return {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.prompt_tokens_cached,
            "generation_tokens": stats.generation_tokens,
            "queries": stats.prefix_cache_queries,
            "hits": stats.prefix_cache_hits,
            "preemptions": stats.preemptions,
            "steps": stats.steps,
            "finished": sum(self.finished.values()),
            "rejected": self.rejected,
            "restarts": max(0.0, self.engine_starts - 1.0),
        }

    def rates(self, before: "Moment | None") -> dict[str, float] | None:
        """Return what *before* tells of the growth a second; None without one."""
        if before is None or self.at <= before.at:
            return None
        now, then, seconds = self.counters(), before.counters(), self.at - before.at
        return {name: round((now[name] - then[name]) / seconds, 3) for name in RATED}

    def body(self, before: "Moment | None") -> dict[str, Any]:
        """Return all of it for the page; *before* is what rates are measured from."""
        stats = self.stats
        counted = {
            name: stats.histograms[histogram]
            for name, histogram in HISTOGRAMS.items()
            if histogram in stats.histograms
        }
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "open": self.open_requests,
            "kv_usage": round(stats.kv_usage, 5),
            "kv_tokens": stats.num_blocks * stats.block_size_tokens,
            "counters": self.counters(),
            "finished": self.finished,
            "rates": self.rates(before),
            "histograms": {name: [*counts, total] for name, (counts, total) in counted.items()},
        }
