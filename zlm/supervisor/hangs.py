"""Finds who is stuck: looks at the heartbeats every second, and has what hangs replaced.

Before a stuck process is killed, every process writes where each of its threads stands to the log,
for whoever wants to know why. So do those of other machines, to the log there: a node tells the
head who is stuck, and leaves the rest to it. A process that loads may run and yet wait for what
never comes: a start must give news of its progress within each --startup-timeout. While nobody is
stuck, the service manager's watchdog is fed: it acts if this process itself hangs, which front ends
tell on /health, too.
"""

import asyncio
import faulthandler
import logging
import signal
import time
from collections.abc import Callable

from zlm.config import ServerOptions
from zlm.process.heartbeat import Beat, Heartbeat, HeartbeatReader
from zlm.process.launch import MAX_PROCESSES
from zlm.process.watch import Silence, Stall, Watch
from zlm.supervisor.notify import Notifier
from zlm.supervisor.tree import Tree, Watcher
from zlm.supervisor.units import Name, State

LOOK_SECONDS = 1.0
LOADING_PATIENCE = 6  # times the limit; loading a big library from a slow disk runs nothing else
STACKS_SECONDS = 0.15  # for one process to write its stacks

logger = logging.getLogger(__name__)


class HangWatch:
    """The supervisor's onlooker. ``run`` it as a task."""

    def __init__(
        self,
        tree: Tree,
        keeper: Watcher,
        notifier: Notifier,
        options: ServerOptions,
        tell: Callable[[Stall], None] | None = None,
    ) -> None:
        """*tell* takes who is stuck every time that it is seen, if he is not to be lost here."""
        self._tree = tree
        self._keeper = keeper
        self._notifier = notifier
        self._tell = tell
        self._hang_seconds = options.hang_timeout_seconds
        self._startup_seconds = options.startup_timeout_seconds
        self._reader = HeartbeatReader(tree.group.runtime)
        self._own = Heartbeat(tree.group.runtime, MAX_PROCESSES, "supervisor", 0)
        self._watch = Watch()
        self._silence = Silence()

    async def run(self) -> None:
        """Look, for ever."""
        period = min(LOOK_SECONDS, (self._notifier.watchdog_seconds or 60.0) / 3)
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            self._own.beat(work_pending=False, steps=0)
            self._own.alive()
            self._watch.look(self._beats(), now)
            stuck = self._find() or self._find_silent(now)
            if stuck is None:
                self._notifier.watchdog()
            elif self._tell is not None:
                self._tell(stuck)
            elif not self._tree.is_ending:
                await self._condemn(stuck)

    def _beats(self) -> list[Beat]:
        """Return all records, with one that never changes for a process that has none yet."""
        beats = self._reader.beats()
        group = self._tree.group
        new = set(group.children) - {(beat.role, beat.index) for beat in beats}
        silent = [Beat(role, index, group.pid(role, index), 0, 0, False) for role, index in new]
        return beats + silent

    def _find(self) -> Stall | None:
        """Return the process that is stuck worst; None if all get on."""
        for unit in self._keeper.units:
            if unit.state is State.DOWN:
                continue
            seconds = self._hang_seconds
            if unit.state is State.LOADING:
                seconds *= LOADING_PATIENCE
            for stall in self._watch.stalls(seconds, unit.names):
                if unit.state is State.UP or stall.is_stopped:
                    return stall
            told = self._tree.stuck
            if told and unit.role == "engine" and told.incarnation == unit.incarnation:
                return Stall(told.role, told.index, told.seconds, told.is_stopped)
        return None

    def _find_silent(self, now: float) -> Stall | None:
        """Return a process that has not said for too long how far its loading is."""
        for (role, index), seconds in self._silence.look(self._keeper.news(), now).items():
            if seconds > self._startup_seconds:
                return Stall(role, index, seconds, False)
        return None

    async def _condemn(self, stall: Stall) -> None:
        logger.error("%s: it hangs; the stacks of all processes follow", stall.describe())
        name = stall.role, stall.index
        if stall.role == "supervisor":
            await self._write_stacks(name)
            self._tree.fail(f"reading the model has made no progress for {stall.seconds:.0f} s")
            return
        incarnation = self._keeper.incarnation(*name)
        await self._write_stacks(name)
        _, _, reason = stall.describe().split(" ", 2)
        self._keeper.lost(name, incarnation, reason)

    async def _write_stacks(self, stuck: Name) -> None:
        """Have every process write its stacks; the one that is stuck, which may have to be
        continued for it, last.
        """
        for name in sorted(self._tree.group.alive, key=lambda name: name == stuck):
            if self.write_stacks_of(*name):
                await asyncio.sleep(STACKS_SECONDS)
        logger.error("stacks of the supervisor:")
        faulthandler.dump_traceback()

    def write_stacks_of(self, role: str, index: int) -> bool:
        """Have a process write its stacks; return whether it does: it may not yet know how to."""
        group = self._tree.group
        where, pid = group.place(role, index), group.pid(role, index)
        # Who has a record knows the signal.
        if not where and not any(beat.pid == pid for beat in self._reader.beats()):
            return False
        logger.error(
            "stacks of %s %d%s (%s):", role, index, where, f"process {pid}" if pid else "there"
        )
        group.signal(role, index, signal.SIGUSR1)
        group.signal(role, index, signal.SIGCONT)
        return True
