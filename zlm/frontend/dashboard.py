"""GET /ui/events: what the page's dashboard shows, as server-sent events, one a second.

Owns the viewers and the one timer that serves them all: without viewers there is none, and nothing
is read. An event is made once and sent to every viewer; to one whose socket is behind it is not,
since the next one says it all again. Any front end tells the same: see ``zlm.process.counts``.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from zlm.config import Resolved
from zlm.errors import Overloaded
from zlm.frontend import snapshot, sse
from zlm.frontend.exchange import Exchange
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.recent import Ended, RecentRequests
from zlm.frontend.routes import Route
from zlm.frontend.snapshot import Moment
from zlm.process import notes

SECONDS = 1.0  # between two events
LONGEST_SECONDS = 600.0  # of a stream: who comes again shows a key again
MOST_VIEWERS = 64  # of a front end

logger = logging.getLogger(__name__)


class Dashboard:
    """The viewers of one front end. ``later`` is set before the first one comes.

    *counts* and *recent* tell of all front ends; *state* gives the server's state and its reason.
    Notes are read from *runtime*.
    """

    def __init__(
        self,
        counts: FrontendMetrics,
        recent: RecentRequests,
        state: Callable[[], tuple[str, str]],
        runtime: Path | None = None,
    ) -> None:
        # Process.
        self._counts = counts
        self._recent = recent
        self._state = state
        self._runtime = runtime
        self._resolved: Resolved | None = None
        self.later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None
        # While there are viewers.
        self._viewers: dict[Exchange, float] = {}  # and until when each is served
        self._timer: asyncio.TimerHandle | None = None
        self._moment: Moment | None = None
        self._now: dict[str, Any] = {}
        self._ended: list[Ended] = []
        self._facts: tuple[Any, ...] = ()  # that ``about`` was told of

    def configure(self, resolved: Resolved) -> None:
        """Take what is served."""
        self._resolved = resolved

    def routes(self) -> list[Route]:
        """Return the rows of the table."""
        return [Route("/ui/events", {"GET": self.watch})]

    def watch(self, exchange: Exchange) -> None:
        """Begin to send events."""
        if exchange.request.method == "HEAD":
            exchange.respond(200)
            return
        if len(self._viewers) >= MOST_VIEWERS:
            raise Overloaded(f"{MOST_VIEWERS} pages watch this server, which is the limit")
        assert self.later is not None, "a viewer came before the front end was there"
        if not self._viewers:
            self._look()
            self._timer = self.later(SECONDS, self._tick)
        exchange.on_disconnect = partial(self._leave, exchange)
        self._viewers[exchange] = time.monotonic() + LONGEST_SECONDS
        exchange.write(sse.event({**self._now, "about": self._about(), "recent": self._ended}))

    def close(self) -> None:
        """Send every viewer away."""
        for exchange in list(self._viewers):
            self._leave(exchange)
            exchange.end(close=True)

    def _leave(self, exchange: Exchange) -> None:
        del self._viewers[exchange]
        if not self._viewers and self._timer is not None:
            self._timer.cancel()
            self._timer = self._moment = None

    def _tick(self) -> None:
        try:
            frame = sse.event(self._look())
        except OSError as error:  # no descriptor is left, say: viewers come again
            logger.warning("the dashboard cannot be shown: %s", error)
            self.close()
            return
        assert self._moment is not None and self.later is not None
        for exchange, until in list(self._viewers.items()):
            if exchange.writable:
                exchange.write(frame)
            if self._moment.at > until:
                self._leave(exchange)
                exchange.end()
        if self._viewers:
            self._timer = self.later(SECONDS, self._tick)

    def _look(self) -> dict[str, Any]:
        """Read what there is now; return what those who saw the former event are to be told."""
        before, now = self._moment, Moment.of(self._counts.pages(), time.monotonic())
        state, reason = self._state()
        self._moment = now
        self._now = {
            "time": time.time(),
            "state": state,
            "reason": reason,
            **now.body(before),
            "processes": self._counts.memory(),
        }
        news = dict(self._now)
        ended = self._recent.newest()
        if ended != self._ended:
            self._ended = news["recent"] = ended
        facts = (self._resolved, *self._stamps())
        if facts != self._facts:
            self._facts, news["about"] = facts, self._about()
        return news

    def _stamps(self) -> tuple[int, ...]:
        if self._runtime is None:
            return ()
        return tuple(notes.stamp(self._runtime, name) for name in (notes.MEMORY, notes.START))

    def _about(self) -> dict[str, Any]:
        assert self._resolved is not None, "a viewer was let in before the launch"
        memory = start = None
        if self._runtime is not None:
            memory = notes.read(self._runtime, notes.MEMORY)
            start = notes.read(self._runtime, notes.START)
        return snapshot.about(self._resolved, memory, start)
