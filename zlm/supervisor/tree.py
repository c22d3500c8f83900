"""What the supervisor knows of its processes, and the one place where news of them comes in.

``Tree`` owns the process group and the supervisor's inbox. News are messages, deaths and signals;
each changes a field here and wakes the one coroutine that waits in ``until``. The order in which a
tree comes up is in ``main``, the order in which it ends in ``drain``.

The first fault is the tree's: a child's Fatal, or a death that nobody asked for. A child that fails
sends Fatal and then exits, but its death may be seen first; a death with an exit status therefore
waits a moment for its reason.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import zmq

from zlm.config import ServerOptions
from zlm.ipc.sockets import AsyncInbox, address
from zlm.messages import Drained, Fatal, Progress, Ready, ServerState, ToSupervisor
from zlm.process.launch import Death, ProcessGroup
from zlm.supervisor.listen import Listener

LISTEN_FD = "ZLM_LISTEN_FD"  # environment of front ends: descriptor of the listening socket
REASON_SECONDS = 0.5  # how long a death with an exit status waits for the child's Fatal
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

logger = logging.getLogger(__name__)

Name = tuple[str, int]  # role and index


class Tree:
    """The child processes of one server and all that is known of them."""

    def __init__(
        self, group: ProcessGroup, context: zmq.Context, on_progress: Callable[[str], None]
    ) -> None:
        """Watch *group*; call within a running event loop. *on_progress* gets a line of text."""
        self.group = group
        self.expected: set[Name] = set()
        self.ready: dict[Name, float] = {}  # time.monotonic() of each child's Ready
        self.drained: set[int] = set()  # front ends that said Drained
        self.fault: str | None = None  # the first thing that went wrong
        self.num_signals = 0  # requests to end
        self.is_stopping = False  # deaths are expected from now on
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        at = address(group.runtime, "supervisor")
        self._inbox = AsyncInbox(context, at, ToSupervisor, self._take, on_error=self._misread)
        self._loop.add_signal_handler(signal.SIGCHLD, self._bury)
        for number in END_SIGNALS:
            # nohup has SIGHUP ignored; that is to stay so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._count_signal, number)

    def spawn_all(self, options: ServerOptions, listener: Listener) -> None:
        """Start every process; each front end inherits a socket of *listener*."""
        self._spawn("worker", 0)  # the longest to load goes first
        self._spawn("engine", 0)
        for index in range(options.tokenizer_pool_size or 1):
            self._spawn("tokenizer", index)
        for index in range(options.api_server_count or 1):
            fd = listener.fileno(index)
            self._spawn("frontend", index, pass_fds=(fd,), env={LISTEN_FD: str(fd)})

    def _spawn(self, role: str, index: int, **keywords: Any) -> None:
        self.group.spawn(role, index, **keywords)
        self.expected.add((role, index))

    # ------------------------------------------------------------------------------- questions

    @property
    def is_ending(self) -> bool:
        """Whether a signal or a fault asks for the end."""
        return self.num_signals > 0 or self.fault is not None

    @property
    def is_ready(self) -> bool:
        """Whether every process has said that it can work."""
        return self.expected <= self.ready.keys()

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

    def fail(self, text: str) -> None:
        """Note that something went wrong; the first fault is the one that is told."""
        if self.fault is None and not self.is_stopping:
            self.fault = text
        self._news.set()

    def close(self) -> None:
        """Take no more news, and no more signals: this process is about to exit."""
        self._inbox.close()
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for number in END_SIGNALS:
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _take(self, message: Ready | Progress | Fatal | Drained) -> None:
        match message:
            case Ready(role, index, detail):
                self.ready[role, index] = time.monotonic()
                logger.info("%s %d is ready%s", role, index, f": {detail}" if detail else "")
            case Progress(role, index, text):
                logger.info("%s %d: %s", role, index, text)
                self._on_progress(f"{role}: {text}")
                if not self.is_ready:
                    self.tell_frontends("loading", f"the model is being loaded ({role}: {text})")
            case Fatal(role, index, text):
                how = "died" if (role, index) in self.ready else "could not start"
                self.fail(f"{role} {index} {how}: {text}")
            case Drained(index):
                self.drained.add(index)
        self._news.set()

    def _misread(self, error: Exception) -> None:
        self.fail(f"the supervisor got a message that it cannot take: {error}")

    def _bury(self) -> None:
        for death in self.group.poll():
            logger.debug("%s %d %s", death.role, death.index, death.describe())
            if death.status < 0 or self.is_stopping:
                self._mourn(death)
            else:
                self._loop.call_later(REASON_SECONDS, self._mourn, death)
        self._news.set()

    def _mourn(self, death: Death) -> None:
        if death.status == -signal.SIGKILL and not self.is_stopping:
            logger.warning("when memory runs out the kernel kills with SIGKILL: see dmesg")
        if self.is_stopping and death.status != 0 and self.fault is None:
            logger.warning("%s %d %s", death.role, death.index, death.describe())
        self.fail(f"{death.role} {death.index} died: {death.describe()}")

    def _count_signal(self, number: int) -> None:
        self.num_signals += 1
        logger.info("got %s", signal.Signals(number).name)
        self._news.set()
