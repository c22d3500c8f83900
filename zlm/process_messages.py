"""Messages of the life of processes: start, readiness, faults, drain, stop, and their measurement.

The base of all messages is here, too. They are part of ``zlm.messages``, from where everybody takes
them; see there for the rules.
"""

from typing import Literal

import msgspec

from zlm.config import Resolved

Action = Literal["reset_prefix_cache", "abort_requests", "sleep", "wake_up"]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """Base of all structs that cross a boundary (mypy wants ``frozen`` said again by each)."""


class Launch(Message, frozen=True, tag=1):
    """Supervisor (or LLM) → every child, once: what to run.

    ``incarnations`` are those of processes that took the place of another: role, index, number.
    With ``probe`` a Probe comes before the first request; ServerState ``ready`` follows it.
    """

    resolved: Resolved
    incarnations: list[tuple[str, int, int]] = []
    probe: bool = False

    def incarnation(self, role: str, index: int = 0) -> int:
        """Return the incarnation of a process when this was sent."""
        return next((n for r, i, n in self.incarnations if (r, i) == (role, index)), 0)


class Ready(Message, frozen=True, tag=2):
    """Child → supervisor: this process can work. ``detail`` is a line for the log.

    A tokenizer says it once for each incarnation of the engine core.
    """

    role: str
    index: int
    detail: str = ""
    incarnation: int = 0  # of the sender
    engine: int = 0  # from a tokenizer: incarnation of the engine core it works with


WAITING = "waiting for "


class Progress(Message, frozen=True, tag=3):
    """Child → supervisor while loading: a phase for STATUS and the log.

    A text that begins with WAITING stands in the table of the start alone.
    """

    role: str
    index: int
    text: str
    incarnation: int = 0  # of the sender


class Fatal(Message, frozen=True, tag=4):
    """Child → supervisor: this process is about to exit and why."""

    role: str
    index: int
    text: str
    incarnation: int = 0  # of the sender


class ServerState(Message, frozen=True, tag=5):
    """Supervisor → front ends, engine core: the state of the server, and a line that says why.

    ``loading``, ``ready``, ``restarting`` (the engine core was lost and is being brought up again),
    ``sleeping`` (it was taken down until it is wanted again) or ``draining``. The engine core is
    told ``ready`` alone: what it counts begins there.
    """

    state: str
    reason: str = ""
    retry_after_seconds: int = 0  # when it may be ready; 0: not known


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


class PeerUp(Message, frozen=True, tag=11):
    """Supervisor → front ends, tokenizers, engine core: a process has taken another's place.

    Front ends are told of a tokenizer when it can work; everybody else when it was started.
    """

    role: str
    index: int
    incarnation: int


class PeerLost(Message, frozen=True, tag=12):
    """Supervisor → front ends, tokenizers, engine core: a process is dead, or as good as dead.

    What was open with it will never be answered by it: the receiver ends that. Said of an engine
    core to the tokenizers, of a tokenizer to front ends and the engine core, and of a front end to
    the tokenizers.
    """

    role: str
    index: int
    incarnation: int
    reason: str = ""


class Probe(Message, frozen=True, tag=13):
    """Supervisor → front end: have one token made, all the way round. Answered by Probed."""


class Probed(Message, frozen=True, tag=14):
    """Front end → supervisor: a token was made, or what went wrong."""

    index: int
    problem: str = ""
    incarnation: int = 0  # of the sender


class Administer(Message, frozen=True, tag=15):
    """Front end → supervisor → engine core (reset_prefix_cache) or front ends (abort_requests).

    Each of them answers with Administered, as the supervisor does to the other actions, which are
    its own. ``call`` is an id of the front end that asks.
    """

    call: int
    action: Action
    names: list[str] = []  # of requests; none: all


class Administered(Message, frozen=True, tag=16):
    """Engine core, front end or supervisor → the front end that asked: it is done.

    ``count`` is how many blocks were forgotten, or requests aborted.
    """

    call: int
    count: int


class Lost(Message, frozen=True, tag=17):
    """Part of NodeState: a worker there is dead or must die, and why."""

    role: str
    index: int
    reason: str
    incarnation: int


class Stuck(Message, frozen=True, tag=25):
    """Part of NodeState: a worker there does not get on. Told again until the worker is dead."""

    role: str
    index: int
    seconds: float
    is_stopped: bool  # it does not run at all
    incarnation: int


class NodeState(Message, frozen=True, tag=18):
    """Supervisor of another machine → the head's, every second and with news: how it is there."""

    rank: int  # of the node
    session: int  # a number of that supervisor's own, to tell it from a former one
    head: int  # session of the head's supervisor that it follows; 0: none yet
    address: str  # where it takes an Order
    facts: dict[str, str]  # what must be the same on all nodes, as far as it is known
    running: int = -1  # incarnation of its living workers; -1: none lives
    news: list[Ready | Progress | Lost | Stuck] = []


class Order(Message, frozen=True, tag=19):
    """The head's supervisor → that of another machine, every second and when it changes.

    What is to be there: workers of an incarnation, and what they run once that is known. Those of
    any other are to die.
    """

    session: int  # of the head's supervisor
    incarnation: int = -1  # -1: no workers
    launch: Launch | None = None
    stacks_of: int = -1  # the worker that is to write its stacks now; -1: none
    leave: bool = False  # stop the workers and exit with status 0, or with 1 after a ``fault``
    fault: str = ""


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
