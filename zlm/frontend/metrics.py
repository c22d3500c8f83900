"""What this front end counts: answers, ends of sequences, rejections, and what waits.

Owns the front end's count page. Each exchange is counted once, when it is over: by the status of
its answer, and each sequence that it asked for by how that ended. A front end that was killed left
sequences open that nobody can end any more: its successor counts them as aborted. What is shown
for all front ends together is in ``exposition``.
"""

from pathlib import Path

from zlm.config import Resolved
from zlm.frontend.access_log import QUIET
from zlm.frontend.exchange import Exchange
from zlm.frontend.exposition import CONTENT_TYPE as CONTENT_TYPE, Exposition
from zlm.metrics import REASONS, EngineStats, engine_stats
from zlm.process.counts import CountPage, Values, path_of, read_all
from zlm.process.heartbeat import FILE_NAME, HeartbeatReader
from zlm.process.linux import memory_bytes

# Entries of the page. The labels of one stand behind its name, with tabs between.
HTTP, FINISHED, REJECTED, QUEUE = "http", "finished", "rejected", "queue"
OPEN_SEQUENCES = "open sequences"

METHODS = {"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"}
OTHER = "other"


class FrontendMetrics:
    """The counts of front end number *index*, and the text of all processes' together."""

    def __init__(self, index: int, runtime: Path | None = None) -> None:
        """Go on with the counts in *runtime*; without one, count for this front end alone.

        Raises OSError if there is no room for the page.
        """
        self._index = index
        self._runtime = runtime
        self._page = CountPage(None if runtime is None else path_of(runtime, "frontend", index))
        self._finished = {reason: self._page.cells(f"{FINISHED}\t{reason}") for reason in REASONS}
        self._open_sequences = self._page.cells(OPEN_SEQUENCES)
        self._answers: dict[tuple[str, str, int], memoryview[float]] = {}
        self._exposition: Exposition | None = None
        self._beats: HeartbeatReader | None = None
        self._finished["abort"][0] += self._open_sequences[0]
        self._open_sequences[0] = 0.0
        self.show_queues(0, [])

    def configure(self, resolved: Resolved) -> None:
        """Take the model whose name labels the engine's metrics."""
        self._exposition = Exposition(resolved)
        if self._runtime is not None and (self._runtime / FILE_NAME).exists():
            self._beats = HeartbeatReader(self._runtime)

    # ------------------------------------------------------------------- counting

    def begun(self, num_sequences: int) -> None:
        """Count sequences that an exchange has asked for; ``finished`` must follow."""
        self._open_sequences[0] += num_sequences

    def finished(self, exchange: Exchange) -> None:
        """Count an exchange that is over."""
        method = exchange.request.method
        self._count_answer(exchange.route, method if method in METHODS else OTHER, exchange.status)
        record = exchange.record
        left = record.num_sequences - len(record.finish_reasons)
        for reason in record.finish_reasons:
            self._finished["stop" if reason == "tool_calls" else reason][0] += 1
        if exchange.client_gone:
            self._finished["abort"][0] += left
        elif exchange.status >= 500 or exchange.fault:
            self._finished["error"][0] += left
        self._open_sequences[0] -= record.num_sequences
        if record.rejection and exchange.route not in QUIET:  # what a probe is told is no news
            self._page.cells(f"{REJECTED}\t{record.rejection}")[0] += 1

    def show_queues(self, num_open: int, by_tokenizer: list[int]) -> None:
        """Put what is open at this moment into the page: in all, and at each tokenizer."""
        self._page.cells(f"{QUEUE}\tfrontend {self._index}")[0] = num_open
        for number, count in enumerate(by_tokenizer):
            self._page.cells(f"{QUEUE}\ttokenizer {number}")[0] = count

    def _count_answer(self, route: str, method: str, status: int) -> None:
        key = (route, method, status)
        cells = self._answers.get(key)
        if cells is None:
            cells = self._page.cells(f"{HTTP}\t{route}\t{method}\t{status}")
            self._answers[key] = cells
        cells[0] += 1

    # ------------------------------------------------------------------- telling

    def render(self) -> bytes:
        """Return the text of all processes' metrics. The launch must have come."""
        assert self._exposition is not None, "metrics were asked for before the launch"
        return self._exposition.text(self.pages(), self.memory())

    def load(self) -> tuple[int, EngineStats]:
        """Return how many requests all front ends had open at their last beat, and what the engine
        core has counted.
        """
        pages = self.pages()
        queues = [
            values.get(f"{QUEUE}\tfrontend {index}", [0.0])[0]
            for index, values in pages.get("frontend", {}).items()
        ]
        return int(sum(queues)), engine_stats(pages.get("engine", {}).get(0, {}))

    def pages(self) -> dict[str, dict[int, Values]]:
        """Return the counts of all processes: by role, then by index."""
        if self._runtime is None:
            return {"frontend": {self._index: self._page.values()}}
        return read_all(self._runtime)

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each living process, by its role and index."""
        beats = [] if self._beats is None else self._beats.beats()
        sizes = {f"{beat.role} {beat.index}": memory_bytes(beat.pid) for beat in beats}
        return {process: size for process, size in sizes.items() if size}
