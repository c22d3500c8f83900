"""Finding the model in a thread, so that signals and deaths are served meanwhile."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from zlm.errors import ZlmError
from zlm.supervisor.tree import Tree

Report = Callable[[str], None]  # takes a line on how far the start is
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Resolving(Generic[T]):
    """The thread, and what it has found. An error ends the tree."""

    def __init__(self, tree: Tree, work: Callable[[Report], T]) -> None:
        """Begin *work*, whose reports are the tree's progress."""
        self.found: T | None = None
        self.found_at = 0.0  # time.monotonic() seconds
        self._tree = tree
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(work,), name="resolve", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread is still at work."""
        return self._thread.is_alive()

    def _run(self, work: Callable[[Report], T]) -> None:
        outcome: T | Exception
        try:
            outcome = work(lambda text: self._call(lambda: self._tree.note_progress(text)))
        except Exception as error:
            outcome = error
        self._call(lambda: self._take(outcome))

    def _call(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens now
            self._loop.call_soon_threadsafe(what)

    def _take(self, outcome: T | Exception) -> None:
        if isinstance(outcome, ZlmError):
            self._tree.fail(outcome.message)
        elif isinstance(outcome, Exception):
            logger.error("reading the model failed", exc_info=outcome)
            self._tree.fail(f"reading the model failed: {type(outcome).__name__}: {outcome}")
        else:
            self.found, self.found_at = outcome, time.monotonic()
            self._tree.wake()
