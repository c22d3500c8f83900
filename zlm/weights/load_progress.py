"""How far the reading of weights is, in words: for logs, and for whoever waits for it to get on."""

import time
from collections.abc import Callable

REPORT_SECONDS = 5.0  # between two lines


class LoadProgress:
    """Tells *say* which part of a checkpoint's tensors has been read; call it after each."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._read: set[str] = set()
        self._next_report = clock() + REPORT_SECONDS

    def __call__(self, name: str, total: int) -> None:
        """Take in that tensor *name* of *total* has been read."""
        self._read.add(name)
        now = self._clock()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            self._say(f"loading weights: {100 * len(self._read) / total:.0f}%")
