"""Messages of the life of processes: start, readiness, faults, drain, stop, and their measurement.

The base of all messages is here, too. They are part of ``zlm.messages``, from where everybody takes
them; see there for the rules.
"""

import msgspec

from zlm.config import Resolved


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """Base of all structs that cross a boundary (mypy wants ``frozen`` said again by each)."""


class Launch(Message, frozen=True, tag=1):
    """Supervisor (or LLM) → every child, once: what to run."""

    resolved: Resolved


class Ready(Message, frozen=True, tag=2):
    """Child → supervisor: this process can work. ``detail`` is a line for the log."""

    role: str
    index: int
    detail: str = ""


class Progress(Message, frozen=True, tag=3):
    """Child → supervisor while loading: a phase for STATUS and the log."""

    role: str
    index: int
    text: str


class Fatal(Message, frozen=True, tag=4):
    """Child → supervisor: this process is about to exit and why."""

    role: str
    index: int
    text: str


class ServerState(Message, frozen=True, tag=5):
    """Supervisor → front ends: ``loading``, ``ready`` or ``draining``, and a line that says why."""

    state: str
    reason: str = ""


class Drain(Message, frozen=True, tag=6):
    """Supervisor → front ends: take no more requests, say Drained when none is open.

    With ``abort`` set, open requests are ended with an error answer at once.
    """

    abort: bool = False


class Drained(Message, frozen=True, tag=7):
    """Front end → supervisor: no request is open any more."""

    index: int


class Stop(Message, frozen=True, tag=8):
    """Supervisor (or LLM) → every child: leave, with exit status 0."""


class Profile(Message, frozen=True, tag=9):
    """LLM → worker: measure ``steps`` steps after ``skip`` more. Answered by Profiled at once.

    With ``steps`` 0 the answer is what has been measured since the last one.
    """

    steps: int
    skip: int = 0
    path: str = ""  # where to write a Chrome trace; empty: measure times only, which costs nothing


class KernelTime(Message, frozen=True):
    """One kernel (on the CPU: one operator) over all steps measured. Part of Profiled."""

    name: str
    launches: int
    seconds: float


class Profiled(Message, frozen=True, tag=10):
    """Worker → LLM (its supervisor): what ``steps`` steps took together; nothing if that is 0."""

    rank: int
    steps: int = 0
    wall_seconds: float = 0.0  # from the first step's begin to the last one's end
    cpu_seconds: float = 0.0  # of the worker's main thread
    in_calls_seconds: float = 0.0  # of the wall time, in launching steps and taking results
    waiting_seconds: float = 0.0  # of the wall time, in calls that wait for the GPU (with a path)
    device_seconds: float = 0.0  # in which the GPU had work (with a path)
    kernels: list[KernelTime] = []  # the longest first (with a path)
