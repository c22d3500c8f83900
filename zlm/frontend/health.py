"""Whether the processes behind this front end get on, as the heartbeat page tells.

``look`` is called every second; what it sees is what /health answers with, until the next look. So
a probe costs nothing, and a process that is stopped or stuck shows within the time limit, although
the supervisor may still be giving it time. Knows nothing of HTTP.
"""

from pathlib import Path

from zlm.config import Resolved
from zlm.errors import Overloaded, ZlmError
from zlm.process.heartbeat import HeartbeatReader
from zlm.process.watch import Stall, Watch

RETRY_STALLED_SECONDS = 5


class Health:
    """What one front end sees of the supervisor, the engine core, workers and tokenizers."""

    def __init__(self, runtime: Path, resolved: Resolved) -> None:
        config = resolved.config
        self._reader = HeartbeatReader(runtime)
        self._watch = Watch()
        self._seconds = config.server.health_timeout_seconds
        ranks = range(config.parallel.num_workers)
        tokenizers = range(resolved.num_tokenizers)
        self._names = [("supervisor", 0), ("engine", 0)]
        self._names += [("worker", rank) for rank in ranks]
        self._names += [("tokenizer", index) for index in tokenizers]
        self._stall: Stall | None = None

    def look(self, now: float) -> None:
        """Look at the page at *now*, in seconds of time.monotonic()."""
        self._watch.look(self._reader.beats(), now)
        stalls = self._watch.stalls(self._seconds, self._names)
        self._stall = stalls[0] if stalls else None

    def problem(self) -> ZlmError | None:
        """Return who does not get on, or None."""
        if self._stall is None:
            return None
        return Overloaded(self._stall.describe(), retry_after_seconds=RETRY_STALLED_SECONDS)
