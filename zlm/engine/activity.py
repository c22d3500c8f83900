"""The line that tells an operator how the engine core is doing, every now and then.

Pure: what was counted and ``now`` come in, a line goes out. A line covers the time since the one
before it, less that in which there was no work: rates are those of the work, not of the silence
around it. Nothing is said while nothing happens; the last line tells that all is done.
"""

from dataclasses import dataclass

from zlm.metrics import EngineStats

SECONDS = 10.0  # between two lines


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and the numbers in it for a structured log."""

    text: str
    fields: dict[str, float]


class Activity:
    """Keeps the counts that the last line has told, and how long there was work since."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._told = stats
        self._due_at = now  # when the next line is, if anything is untold
        self._busy_since = -1.0  # seconds; below 0: idle
        self._busy_seconds = 0.0  # before that, since the last line
        self._untold = False  # something happened since the last line

    def note(self, now: float, *, idle: bool) -> None:
        """Take note of whether there is work at this moment."""
        if idle:
            if self._busy_since >= 0.0:
                self._busy_seconds += now - self._busy_since
            self._busy_since = -1.0
        elif self._busy_since < 0.0:
            self._busy_since = now
            if not self._untold:
                self._due_at = now + SECONDS
            self._untold = True

    def wait_seconds(self, now: float) -> float | None:
        """Return the seconds until a line is due; None if there is nothing to tell."""
        return max(0.0, self._due_at - now) if self._untold else None

    def line(self, stats: EngineStats, now: float) -> Line:
        """Return the line for what has happened since the last one."""
        if self._busy_since >= 0.0:
            self._busy_seconds += now - self._busy_since
            self._busy_since = now
        seconds = max(self._busy_seconds, 1e-3)
        last, self._told, self._due_at = self._told, stats, now + SECONDS
        self._busy_seconds = 0.0
        self._untold = self._busy_since >= 0.0
        looked_up = stats.prefix_cache_queries - last.prefix_cache_queries
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        prompt = stats.prompt_tokens - last.prompt_tokens
        generation = stats.generation_tokens - last.generation_tokens
        fields = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_usage_percent": round(100.0 * stats.kv_usage, 1),
            "prefix_hit_percent": round(100.0 * hits / looked_up, 1) if looked_up else 0.0,
            "prompt_tokens_per_s": round(prompt / seconds, 1),
            "generation_tokens_per_s": round(generation / seconds, 1),
            "preemptions": stats.preemptions - last.preemptions,
        }
        return Line(_text(fields), fields)


def _text(fields: dict[str, float]) -> str:
    text = (
        f"running {fields['running']}, waiting {fields['waiting']}, "
        f"KV cache {fields['kv_usage_percent']} %, "
        f"prefix hits {fields['prefix_hit_percent']} %, "
        f"prompt {fields['prompt_tokens_per_s']} tokens/s, "
        f"generation {fields['generation_tokens_per_s']} tokens/s"
    )
    if fields["preemptions"]:
        text += f", {fields['preemptions']} preemptions"
    return text
