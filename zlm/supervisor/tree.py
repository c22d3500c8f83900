"""The one place where news of the supervisor's processes comes in.

``Tree`` owns the process group and the supervisor's inbox. News are messages, deaths and signals;
each goes to the ``Keeper`` or changes a field here, and wakes the one coroutine that waits in
``until``. The order in which a tree comes up is in ``main``, what happens to those that die in
``keeper``, the order in which a tree ends in ``drain``.

The first fault ends the tree: something that the keeper cannot, or may not, put right. A child that
fails sends Fatal and then exits, but its death may be seen first; a death with an exit status
therefore waits a moment for its reason. Messages of a former incarnation are dropped.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from zlm.ipc.sockets import AsyncInbox, address
from zlm.messages import (
    OWNER_SHIFT,
    WAITING,
    Administer,
    Administered,
    Drained,
    Fatal,
    Lost,
    Probed,
    Progress,
    Ready,
    ServerState,
    Stuck,
    ToSupervisor,
)
from zlm.process.launch import Death, ProcessGroup
from zlm.process.linux import memory_bytes, oom_kills
from zlm.supervisor.startup_table import StartupTable
from zlm.supervisor.units import Name, Unit

REASON_SECONDS = 0.5  # how long a death with an exit status waits for the child's Fatal
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """Who is told of processes that come and go: the ``Keeper``, or the ``Node`` of a machine."""

    units: list[Unit]

    def news(self) -> dict[Name, int]:
        """Return how much news those have given that a start waits for."""

    def incarnation(self, role: str, index: int) -> int:
        """Return which incarnation of a process is the present one."""

    def take_ready(self, message: Ready) -> None:
        """Take in that a process can work."""

    def tell_progress(self, role: str, index: int, text: str) -> None:
        """Take in how far the loading is."""

    def lost(self, name: Name, incarnation: int, reason: str) -> bool:
        """Take in that a process is dead or about to die; return whether that is news."""


class Server(Protocol):
    """Who is told what only a whole server has: the ``Keeper``."""

    def take_probed(self, message: Probed) -> None:
        """Take in that a token has come round, or why not."""

    def sleep(self) -> None:
        """Give up the model's memory."""

    def wake_up(self) -> None:
        """Load the model again."""


class Tree:
    """The child processes of one server and all that is known of them."""

    def __init__(
        self, group: ProcessGroup, context: zmq.Context, on_progress: Callable[[str], None]
    ) -> None:
        """Watch *group*; call within a running event loop. *on_progress* gets a line of text."""
        self.group = group
        self.keeper: Watcher | None = None  # set before anything is spawned
        self.server: Server | None = None  # as is this, if all of a server is here
        self.has_served = False  # a token has come round, at some time
        self.startup: StartupTable | None = None  # is told of phases, while there is one
        self.ready: dict[Name, float] = {}  # time.monotonic() of each child's Ready
        self.drained: set[int] = set()  # front ends that said Drained
        self.fault: str | None = None  # the first thing that went wrong
        self.num_signals = 0  # requests to end
        self.num_news = 0  # of how far the supervisor's own part of the start is
        self.stuck: Stuck | None = None  # a worker of another machine, where that was seen last
        self.is_stopping = False  # deaths are expected from now on
        self._oom_kills = oom_kills()  # of the whole machine
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        at = address(group.runtime, "supervisor")
        self._inbox = AsyncInbox(context, at, ToSupervisor, self.take, on_error=self._misread)
        self._loop.add_signal_handler(signal.SIGCHLD, self._bury)
        for number in END_SIGNALS:
            # nohup has SIGHUP ignored; that is to stay so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._count_signal, number)

    # ------------------------------------------------------------------------------- questions

    @property
    def is_ending(self) -> bool:
        """Whether a signal or a fault asks for the end."""
        return self.num_signals > 0 or self.fault is not None

    @property
    def answering(self) -> set[int]:
        """The living front ends that had come up, and so may hold requests."""
        return {i for role, i in self.group.alive if role == "frontend" and (role, i) in self.ready}

    def tell_frontends(self, state: str, reason: str) -> None:
        """Send every living front end the state of the server."""
        self.group.broadcast(ServerState(state, reason), "frontend")

    async def until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for *condition*, up to *seconds*; return whether it holds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return condition()
        return True

    # ------------------------------------------------------------------------------------ news

    def wake(self) -> None:
        """Have ``until`` look at its condition again."""
        self._news.set()

    def note_progress(self, text: str) -> None:
        """Say how far the supervisor's own part of the start is."""
        self.num_news += 1
        logger.info("%s", text)
        self._on_progress(text)
        if self.keeper is not None:
            self.keeper.tell_progress("supervisor", 0, text)

    def fail(self, text: str) -> None:
        """Note that something went wrong; the first fault is the one that is told."""
        if self.fault is None and not self.is_stopping:
            self.fault = text
        self._news.set()

    def note_end(self, task: "asyncio.Task[None]") -> None:
        """Take it for a fault if *task*, which was to run for ever, has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the supervisor has failed", exc_info=error)
            self.fail(f"the supervisor has failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Take no more news, and no more signals: this process is about to exit."""
        self._inbox.close()
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for number in END_SIGNALS:
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def take(self, message: Any) -> None:
        """Take in a message of one of the processes."""
        keeper = self.keeper
        assert keeper is not None, "a message of a process that nobody keeps"
        match message:
            case Administer() | Administered():
                self._relay(message)
            case Drained(index):
                self.drained.add(index)
            case Probed(index, incarnation=sender) if self._is_present("frontend", index, sender):
                assert self.server is not None
                self.server.take_probed(message)
            case Ready(role, index, incarnation=sender) if self._is_present(role, index, sender):
                self.ready[role, index] = time.monotonic()
                self._note_phase(role, index, None)
                detail = f": {message.detail}" if message.detail else ""
                logger.info("%s %d is ready%s", role, index, detail)
                keeper.take_ready(message)
            case Progress(role, index, text, sender) if self._is_present(role, index, sender):
                self._note_phase(role, index, text)
                if text.startswith(WAITING):  # not what a start takes its time for
                    return
                logger.info("%s %d: %s", role, index, text)
                self._on_progress(f"{role}: {text}")
                keeper.tell_progress(role, index, text)
            case Fatal(role, index, text, sender):
                how = "died" if (role, index) in self.ready else "could not start"
                keeper.lost((role, index), sender, f"{how}: {text}")
            case Lost(role, index, reason, sender):
                keeper.lost((role, index), sender, reason)
            case Stuck():
                self.stuck = message
        self._news.set()

    def _relay(self, message: Administer | Administered) -> None:
        """Pass an administrator's call to whom it concerns, and what they say back."""
        if isinstance(message, Administered):
            self.group.send("frontend", message.call >> OWNER_SHIFT, message)
            return
        assert self.server is not None
        match message.action:
            case "reset_prefix_cache":
                self.group.broadcast(message, "engine")
                return
            case "abort_requests":
                self.group.broadcast(message, "frontend")
                return
            case "sleep":
                self.server.sleep()
            case "wake_up":
                self.server.wake_up()
        done = Administered(message.call, 1)
        self.group.send("frontend", message.call >> OWNER_SHIFT, done)

    def _is_present(self, role: str, index: int, incarnation: int) -> bool:
        assert self.keeper is not None
        return self.keeper.incarnation(role, index) == incarnation

    def _note_phase(self, role: str, index: int, phase: str | None) -> None:
        """Tell the table of the start that a process begins *phase*; None: it is ready."""
        if self.startup is None or (role, index) not in self.group.alive:
            return
        now, memory = time.monotonic(), memory_bytes(self.group.pid(role, index))
        name = f"{role} {index}"
        if phase is None:
            self.startup.ready(name, now, memory)
        else:
            self.startup.phase(name, phase, now, memory)

    def _misread(self, error: Exception) -> None:
        self.fail(f"the supervisor got a message that it cannot take: {error}")

    def _bury(self) -> None:
        assert self.keeper is not None
        for death in self.group.poll():
            logger.debug("%s %d %s", death.role, death.index, death.describe())
            incarnation = self.keeper.incarnation(death.role, death.index)
            if death.status < 0 or self.is_stopping:
                self._mourn(death, incarnation)
            else:
                self._loop.call_later(REASON_SECONDS, self._mourn, death, incarnation)
        self._news.set()

    def _mourn(self, death: Death, incarnation: int) -> None:
        assert self.keeper is not None
        if self.is_stopping:
            if death.status != 0 and self.fault is None:
                logger.warning("%s %d %s", death.role, death.index, death.describe())
            return
        reason = f"died: {death.describe()}"
        is_news = self.keeper.lost((death.role, death.index), incarnation, reason)
        if is_news and death.status == -signal.SIGKILL and oom_kills() > self._oom_kills:
            self._oom_kills = oom_kills()
            logger.warning(
                "the kernel has killed for want of memory: lower --kv-cache-memory-bytes or "
                "--max-num-seqs, or see with dmesg what else takes it"
            )

    def _count_signal(self, number: int) -> None:
        self.num_signals += 1
        logger.info("got %s", signal.Signals(number).name)
        self._news.set()
