"""What every child process does first and last: dying with its parent, signals, logs, failing.

A child is started by ``zlm.process.launch`` as ``python -m zlm.ROLE.process RUNTIME INDEX`` and
calls ``run(role, body)``. Owns the process's ZeroMQ context and its heartbeat record. Knows nothing
of what the role does.

Dying with the parent takes two means, because each has a hole. The lifeline is a pipe of which the
parent holds the only writing end: when it closes, a small thread here ends the process at once;
that thread cannot run while the process is stopped or a C call keeps the interpreter. PDEATHSIG has
the kernel kill the process then, but only if it was set before the parent was gone. The same thread
shows twice a second, on the heartbeat page, that the process runs.

A process may be the successor of one that has died: its incarnation counts them. Each incarnation
has an inbox of its own, so that nothing which was on its way to the former one reaches it.

SIGINT, SIGTERM and SIGHUP are ignored: a Ctrl-C in a terminal reaches the whole process group, and
it is the parent's place to drain first and then send ``Stop``. They are blocked when this process
starts (its parent's spawning thread blocks them), so there is no moment in which they would kill.

Any exception that leaves ``body``, a thread, or the handler of an ``AsyncInbox`` is the process's
end: it is logged, reported to the parent as ``Fatal``, and the exit status is 1. After a fault of
ours nobody can tell which requests still get their answer; a dead process can be told and replaced.
"""

import faulthandler
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import zmq

from zlm.errors import ZlmError
from zlm.ipc.sockets import AsyncInbox, Inbox, Outbox, address
from zlm.messages import Fatal, Progress, Ready
from zlm.process.heartbeat import Heartbeat
from zlm.process.linux import kill_when_parent_ends, set_process_name
from zlm.process.logs import start_logging

LIFELINE_FD = "ZLM_LIFELINE_FD"  # environment: descriptor of the lifeline's reading end
HEARTBEAT_RECORD = "ZLM_HEARTBEAT_RECORD"  # environment: number of this process's record
INCARNATION = "ZLM_INCARNATION"  # environment: how many processes were this one before
ALIVE_MS = 500  # between two signs that this process runs
PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_WORDS_MS = 2000  # how long an ending process waits for its last messages to be sent

logger = logging.getLogger(__name__)


class Child:
    """What a child knows of itself, and its ways to its peers."""

    def __init__(
        self, role: str, index: int, runtime: Path, heartbeat_record: int, incarnation: int = 0
    ) -> None:
        self.role = role
        self.index = index
        self.incarnation = incarnation
        self.runtime = runtime
        self.context = zmq.Context()
        self.supervisor = Outbox(self.context, self.address("supervisor"), linger_ms=LAST_WORDS_MS)
        self.heartbeat = Heartbeat(runtime, heartbeat_record, role, index)

    @property
    def name(self) -> str:
        """The name of this process in logs: its role, and its index unless that is 0."""
        return f"{self.role} {self.index}" if self.index else self.role

    def address(self, role: str, index: int = 0, incarnation: int = 0) -> str:
        """Return the address of the inbox of process *role* number *index* of this tree."""
        return address(self.runtime, role, index, incarnation)

    def outbox(self, role: str, index: int = 0, incarnation: int = 0) -> Outbox:
        """Return a new sending end to one incarnation of process *role* number *index*."""
        return Outbox(self.context, self.address(role, index, incarnation))

    def inbox(self, accepts: Any) -> Inbox:
        """Bind this process's inbox, for a blocking loop; *accepts* is a union of messages."""
        return Inbox(self.context, self._own_address(), accepts)

    def async_inbox(self, accepts: Any, handler: Callable[[Any], None]) -> AsyncInbox:
        """Bind this process's inbox on the running event loop.

        An exception in *handler*, or a message that cannot be decoded, ends the process: ``fail``.
        """
        at = self._own_address()
        return AsyncInbox(self.context, at, accepts, handler, on_error=self.fail)

    def _own_address(self) -> str:
        return self.address(self.role, self.index, self.incarnation)

    def say_ready(self, detail: str = "", *, engine: int = 0) -> None:
        """Tell the parent that this process can work; *detail* is a line for the log.

        *engine* is the incarnation of the engine core that a tokenizer works with.
        """
        self.supervisor.send(Ready(self.role, self.index, detail, self.incarnation, engine))

    def say_progress(self, text: str) -> None:
        """Tell the parent how far this process has got in loading."""
        self.supervisor.send(Progress(self.role, self.index, text, self.incarnation))

    def fail(self, error: BaseException) -> NoReturn:
        """Log *error*, report it to the parent and end the process; from any thread."""
        if isinstance(error, ZlmError):
            text = error.message
            logger.error("%s", text)
        else:
            text = f"{type(error).__name__}: {error}"
            logger.error("%s", text, exc_info=error)
        # A context of its own: whatever state the process's sockets are in, and on any thread.
        context = zmq.Context()
        last_words = Outbox(context, self.address("supervisor"), linger_ms=LAST_WORDS_MS)
        last_words.send(Fatal(self.role, self.index, text, self.incarnation))
        last_words.close()
        context.term()
        logging.shutdown()
        os._exit(1)


def run(role: str, body: Callable[[Child], None]) -> None:
    """Run *body* as child process *role*; the last two arguments of the command say which one.

    Returns when *body* does, after what it sent to the supervisor has gone out. Does not return
    if it fails.
    """
    if LIFELINE_FD not in os.environ:
        sys.exit(f"zlm: the {role} process is started by zlm itself: use `zlm serve`")
    runtime, index = Path(sys.argv[-2]), int(sys.argv[-1])
    _ignore_parent_signals()
    lifeline = int(os.environ.pop(LIFELINE_FD))
    os.set_inheritable(lifeline, False)
    kill_when_parent_ends()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 PID shows where every thread stands
    record = int(os.environ.pop(HEARTBEAT_RECORD))
    child = Child(role, index, runtime, record, int(os.environ.pop(INCARNATION, "0")))
    _hold_lifeline(lifeline, child.heartbeat)
    set_process_name(f"zlm: {child.name}")
    start_logging(child.name)
    threading.excepthook = lambda thrown: child.fail(thrown.exc_value or RuntimeError("a thread"))
    try:
        body(child)
    except BaseException as error:
        child.fail(error)
    child.context.destroy()


def _ignore_parent_signals() -> None:
    for number in PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)


def _hold_lifeline(fd: int, heartbeat: Heartbeat) -> None:
    work = (fd, heartbeat)
    threading.Thread(target=_live_with_parent, args=work, name="lifeline", daemon=True).start()


def _live_with_parent(fd: int, heartbeat: Heartbeat) -> None:
    try:
        lifeline = select.poll()
        lifeline.register(fd, select.POLLIN)
        while not lifeline.poll(ALIVE_MS):
            heartbeat.alive()
    finally:
        os._exit(1)
