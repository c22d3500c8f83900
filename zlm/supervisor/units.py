"""Units: processes that live and die together, and how often one may be brought up again.

Pure: times are arguments. A unit is a front end, a tokenizer, or the engine core with its workers.
"""

import enum
from collections import deque
from dataclasses import dataclass, field

WINDOW_SECONDS = 600.0  # failures further back are forgotten, once it has worked since
DELAYS_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the first restart, the second ...

Name = tuple[str, int]  # role and index


class State(enum.Enum):
    """LOADING → UP → DOWN → LOADING → ... (a unit that is loading may go down as well)."""

    LOADING = "loading"  # started, not all of its processes are ready
    UP = "up"
    DOWN = "down"  # its processes are killed; it is to be started again


@dataclass(slots=True)
class Backoff:
    """When to restart what has failed.

    At once, if it had worked; the longer, the more often it has failed to come up since.
    """

    most: int  # restarts within WINDOW_SECONDS, or in a row: a start may fail slowly
    _failures: deque[float] = field(default_factory=deque)
    _in_a_row: int = 0  # failures since it last worked

    def after_success(self) -> None:
        """Note that it works."""
        self._in_a_row = 0

    def after_failure(self, now: float) -> float | None:
        """Note a failure at *now*; return the seconds to wait, None if it was one too many."""
        self._failures.append(now)
        self._in_a_row += 1
        while len(self._failures) > self._in_a_row and self._failures[0] < now - WINDOW_SECONDS:
            self._failures.popleft()
        if len(self._failures) > self.most:
            return None
        return DELAYS_SECONDS[min(self._in_a_row, len(DELAYS_SECONDS)) - 1]


@dataclass(slots=True)
class Unit:
    """Processes that live and die together. Owned by the ``Keeper``."""

    names: tuple[Name, ...]
    backoff: Backoff
    state: State = State.LOADING
    incarnation: int = 0
    ready: set[Name] = field(default_factory=set)
    num_news: int = 0  # signs that its start gets on
    lost_at: float = 0.0  # time.monotonic() seconds

    @property
    def role(self) -> str:
        """The role of its first process, which stands for all."""
        return self.names[0][0]

    @property
    def awaited(self) -> Name:
        """The process that its start waits for: of those not ready the one that loads longest."""
        waiting = (name for name in reversed(self.names) if name not in self.ready)
        return next(waiting, self.names[0])

    @property
    def index(self) -> int:
        """The index of its first process."""
        return self.names[0][1]
