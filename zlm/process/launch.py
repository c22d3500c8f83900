"""Starting, watching and stopping the child processes of a tree: for the supervisor and ``LLM``.

``ProcessGroup`` owns the child processes, the lifeline that they die by, the heartbeat page, and an
outbox to each child. Knows nothing of the order in which a tree comes up.

Who spawns. PDEATHSIG fires when the *thread* that forked a child ends, not only when the process
does, and an ``LLM`` may be made in a thread that ends long before it. So each group forks from a
thread of its own that lives until its last child is gone. That thread also blocks the signals that
children must not be killed by while they start; a new process inherits the mask.

A child's environment is the parent's less what is the parent's alone: systemd's sockets, the keys,
and the hub's token, since the parent alone downloads. Settings of compute threads are the worker's
business; the others, which compute nothing, keep numpy from starting a thread a core.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import zmq

from zlm.ipc.sockets import Outbox, address
from zlm.messages import Message, Stop
from zlm.process import heartbeat
from zlm.process.child import HEARTBEAT_RECORD, INCARNATION, LIFELINE_FD, PARENT_SIGNALS

MAX_PROCESSES = 256
PARENTS_OWN = {
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "RUNTIME_DIRECTORY",
    "ZLM_API_KEY",
    "ZLM_ADMIN_API_KEY",
    "ZLM_CLUSTER_KEY",
    "HF_TOKEN",
    "HUGGINGFACE_HUB_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
}


@dataclass(frozen=True, slots=True)
class Death:
    """A child that has ended. ``status`` is its exit status, or minus the signal that killed it."""

    role: str
    index: int
    status: int

    def describe(self) -> str:
        """Return how it ended, in words."""
        if self.status >= 0:
            return f"exited with status {self.status}"
        number = -self.status
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        return f"killed by signal {number} ({name})"


def module_command(role: str) -> list[str]:
    """Return the command that runs process *role*, less its arguments RUNTIME and INDEX.

    -P: a module of the user's working directory must not stand in for one of ours.
    """
    return [sys.executable, "-P", "-m", f"zlm.{role}.process"]


class ProcessGroup:
    """The child processes of one tree. Used by one thread at a time.

    ``command`` gives the command of a role, less RUNTIME and INDEX; tests put in their own.
    """

    def __init__(
        self,
        runtime: Path,
        context: zmq.Context,
        *,
        command: Callable[[str], Sequence[str]] = module_command,
    ) -> None:
        self.runtime = runtime
        self._context = context
        self._command = command
        self._children: dict[tuple[str, int], subprocess.Popen[bytes]] = {}  # the living
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        self._records: dict[tuple[str, int], int] = {}  # on the heartbeat page
        self._lifeline = os.pipe()  # both ends close on exec; children get the reading end
        self._spawner = _Spawner()
        self._closed = False
        heartbeat.create(runtime, MAX_PROCESSES + 1)  # the last is the supervisor's

    @property
    def children(self) -> list[tuple[str, int]]:
        """Role and index of each child whose death ``poll`` has not reported."""
        return list(self._children)

    @property
    def alive(self) -> list[tuple[str, int]]:
        """Role and index of each process that lives, as far as is known."""
        return self.children

    def pid(self, role: str, index: int = 0) -> int:
        """Return the process id of a child; 0 if it does not live."""
        child = self._children.get((role, index))
        return child.pid if child is not None else 0

    def place(self, role: str, index: int) -> str:
        """Return on which other machine a process is, to be put after its name."""
        return ""

    def absent(self) -> str:
        """Return which machines are not there, to be put after why a process is lost."""
        return ""

    def spawn(
        self,
        role: str,
        index: int,
        *,
        incarnation: int = 0,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start process *role* number *index*; it inherits *pass_fds*, and *env* is added.

        It may take the place of one that has ended: *incarnation* counts them. Raises OSError if
        the system cannot start it.
        """
        name = role, index
        assert name not in self._children and not self._closed
        environment = {k: v for k, v in os.environ.items() if k not in PARENTS_OWN}
        if role != "worker":
            environment.setdefault("OMP_NUM_THREADS", "1")
            environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        environment |= env or {}
        environment[LIFELINE_FD] = str(self._lifeline[0])
        record = self._records.setdefault(name, len(self._records))
        heartbeat.clear(self.runtime, record)
        environment[HEARTBEAT_RECORD] = str(record)
        environment[INCARNATION] = str(incarnation)
        command = [*self._command(role), str(self.runtime), str(index)]
        fds = (self._lifeline[0], *pass_fds)
        self._children[name] = self._spawner.spawn(command, environment, fds)
        if name in self._outboxes:
            self._outboxes[name].close()
        to = address(self.runtime, role, index, incarnation)
        self._outboxes[name] = Outbox(self._context, to)

    def send(self, role: str, index: int, message: Message) -> None:
        """Send *message* to one child; queued until the child has bound its inbox."""
        self._outboxes[role, index].send(message)

    def broadcast(self, message: Message, role: str | None = None) -> None:
        """Send *message* to all living children, or to those of one *role*."""
        for child_role, index in self._children:
            if role in (None, child_role):
                self.send(child_role, index, message)

    def poll(self) -> list[Death]:
        """Return the children that have ended since the last call; never blocks."""
        deaths = []
        for (role, index), process in list(self._children.items()):
            status = process.poll()
            if status is not None:
                del self._children[role, index]
                deaths.append(Death(role, index, status))
        return deaths

    def signal(self, role: str, index: int, number: int) -> None:
        """Send a signal to one child, if it lives; ``poll`` tells of its death."""
        process = self._children.get((role, index))
        if process is not None:
            process.send_signal(number)

    def stop(self, timeout: float) -> list[Death]:
        """Ask every child to leave, wait up to *timeout* seconds, kill the rest; return the dead.

        The group is closed after it. May be called again.
        """
        self.broadcast(Stop())
        deadline = time.monotonic() + timeout
        for process in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
                process.wait(max(0.0, deadline - time.monotonic()))
        deaths = self.poll()
        return deaths + self.kill()

    def kill(self) -> list[Death]:
        """Kill every child at once, wait for the end of each and close the group."""
        for process in self._children.values():
            process.kill()
        for process in self._children.values():
            process.wait()
        deaths = self.poll()
        self._close()
        return deaths

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for outbox in self._outboxes.values():
            outbox.close()
        self._spawner.close()
        for fd in self._lifeline:
            os.close(fd)


class _Spawner:
    """A thread that forks; it must live as long as the processes that it has started."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="zlm-spawner", daemon=True).start()

    def spawn(
        self, command: list[str], environment: dict[str, str], fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        started: Future[subprocess.Popen[bytes]] = Future()

        def job() -> None:
            try:
                started.set_result(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=_stderr(),  # stdout is the user's: of a program that uses LLM
                        env=environment,
                        pass_fds=fds,
                    )
                )
            except BaseException as error:
                started.set_exception(error)

        self._jobs.put(job)
        return started.result()

    def close(self) -> None:
        self._jobs.put(None)

    def _loop(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
        while (job := self._jobs.get()) is not None:
            job()


def _stderr() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
