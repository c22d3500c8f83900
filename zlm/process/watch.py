"""Who of a tree has stopped getting on: heartbeats in, stalls out.

Pure: beats and the time are arguments. Used by the supervisor, which restarts what is stuck, and by
front ends, which say so on /health.

A process has stalled when it does not run, or when it does not get on:

- it does not run: its second hand (``last_alive_ns``) stands still. It is stopped, or a C call
  holds Python's lock.
- a front end or tokenizer does not get on when its loop, which turns every second whether there is
  work or not, stands still.
- an engine core or worker does not get on when it has work pending and finishes no step. A step may
  take long on a CPU, so the longest that a worker has taken counts several times. While a worker
  is at a step, an engine core waits for it, and is not to blame.

Time is counted in looks: between two looks at most LOOK_SECONDS are held against anybody. So when
the whole machine was paused, or this onlooker was, nobody else is blamed for it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zlm.process.heartbeat import Beat

LOOK_SECONDS = 2.0  # the most that one look adds; look at least this often
PATIENCE_STEPS = 4  # times the longest step that a step may take
STEPPING_ROLES = ("engine", "worker")

Name = tuple[str, int]  # role and index


@dataclass(frozen=True, slots=True)
class Stall:
    """A process that does not get on, and for how long it was seen not to."""

    role: str
    index: int
    seconds: float
    is_stopped: bool  # it does not run at all

    def describe(self) -> str:
        """Return it in words, for the log and for clients."""
        how = "has not run" if self.is_stopped else "has made no progress"
        return f"{self.role} {self.index} {how} for {self.seconds:.0f} s"


@dataclass(slots=True)
class _Seen:
    """What was last seen of a process, and since when it is so."""

    beat: Beat
    stopped_for: float = 0.0
    stuck_for: float = 0.0


class Watch:
    """The memory of one onlooker."""

    def __init__(self) -> None:
        self._seen: dict[Name, _Seen] = {}
        self._looked_at: float | None = None
        self._longest_step = 0.0

    def look(self, beats: Iterable[Beat], now: float) -> None:
        """Take in all records as they are at *now*, in seconds of time.monotonic()."""
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        passed = min(passed, LOOK_SECONDS)
        self._looked_at = now
        seen = {}
        for beat in beats:
            name = beat.role, beat.index
            before = self._seen.get(name)
            if before is None or before.beat.pid != beat.pid:
                seen[name] = _Seen(beat)
                continue
            seen[name] = before
            is_still = beat.last_alive_ns == before.beat.last_alive_ns
            before.stopped_for = before.stopped_for + passed if is_still else 0.0
            before.stuck_for = before.stuck_for + passed if _is_stuck(before.beat, beat) else 0.0
            before.beat = beat
        self._seen = seen
        longest = max((each.beat.longest_step_ns for each in seen.values()), default=0)
        self._longest_step = longest / 1e9

    def stalls(self, seconds: float, among: Iterable[Name] | None = None) -> list[Stall]:
        """Return who does not run, or does not get on, for longer than *seconds*; worst first.

        With *among* only these are looked for.
        """
        names = self._seen if among is None else [name for name in among if name in self._seen]
        workers = [each for (role, _), each in self._seen.items() if role == "worker"]
        engine_waits = any(worker.stuck_for > 0.0 for worker in workers)
        found = []
        for role, index in names:
            seen = self._seen[role, index]
            patience = seconds
            if role in STEPPING_ROLES:
                patience = max(seconds, PATIENCE_STEPS * self._longest_step)
            if seen.stopped_for > seconds:
                found.append(Stall(role, index, seen.stopped_for, True))
            elif seen.stuck_for > patience and not (role == "engine" and engine_waits):
                found.append(Stall(role, index, seen.stuck_for, False))
        return sorted(found, key=lambda stall: (not stall.is_stopped, -stall.seconds))


class Silence:
    """How long each of those who load has given no news that it gets on, counted in looks."""

    def __init__(self) -> None:
        self._seen: dict[Name, tuple[int, float]] = {}  # news so far, seconds since the last
        self._looked_at: float | None = None

    def look(self, news: Mapping[Name, int], now: float) -> dict[Name, float]:
        """Take in how much news each has given by *now*; return the seconds of its silence."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, LOOK_SECONDS)
        self._looked_at = now
        seen = {}
        for name, count in news.items():
            before, seconds = self._seen.get(name, (-1, 0.0))
            seen[name] = count, seconds + passed if count == before else 0.0
        self._seen = seen
        return {name: seconds for name, (_, seconds) in seen.items()}


def _is_stuck(before: Beat, now: Beat) -> bool:
    if now.role in STEPPING_ROLES:
        return before.work_pending and now.work_pending and before.steps == now.steps
    return before.last_loop_ns == now.last_loop_ns
