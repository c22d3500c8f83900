"""Keeps a server's processes alive: who is told of a death, and how the dead are replaced.

What dies is replaced by a successor, a new *incarnation*, with an inbox of its own; so nothing that
was on its way to or from the dead one can be taken for the new one's. Who knew the dead one is told
PeerLost, and answers what was open with it:

    engine core or worker    all are killed; tokenizers end the requests that the engine had with
                             an error; front ends answer 503 until a token has come round again
    tokenizer                front ends end its requests with an error and use the others; the
                             engine core drops its sequences, and announces itself to the successor
    front end                its clients see their connections close; tokenizers give its requests
                             up. The listening sockets stay open here: new clients wait in them

Ids tell incarnations apart too, so each request is answered once, whatever news comes first. A unit
that is lost too often within a while ends the server (``Backoff``), and so does everything that
goes wrong before the first token, when there is nobody yet to be served.

Owns the units and the state that front ends are told. Knows nothing of signals and of draining:
``tree`` brings the news, ``hangs`` finds who is stuck.
"""

import asyncio
import logging
import math
import signal
import time

from zlm.config import Resolved, ServerOptions
from zlm.messages import Launch, PeerLost, PeerUp, Probe, Probed, Ready, ServerState
from zlm.supervisor.listen import Listener
from zlm.supervisor.tree import Tree
from zlm.supervisor.units import Backoff, Name, State, Unit

PROBE_SECONDS = 120.0  # for the first token to come round
KILL_SECONDS = 20.0  # for a killed process to be gone; a GPU driver may take its time
REAP_SECONDS = 0.05  # between two looks whether it is
NO_UI = "ZLM_NO_UI"  # environment of front ends: set if they serve no page at /
RETRY_SECONDS = (1, 120)  # least and most that clients are told to wait

logger = logging.getLogger(__name__)


class Keeper:
    """All units of one server, and what they are told of one another."""

    def __init__(
        self, tree: Tree, options: ServerOptions, listener: Listener, workers: int = 1
    ) -> None:
        """Call within a running event loop; *listener* is where front ends get sockets from.

        *workers*: how many of them have the model together.
        """
        self._tree = tree
        self._group = tree.group
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._ui: dict[str, str] = {} if options.ui else {NO_UI: "1"}
        most = options.max_restarts
        names = [("worker", index) for index in range(workers)]
        self._engine = Unit((("engine", 0), *names), Backoff(most))
        tokenizers, frontends = options.tokenizer_pool_size or 1, options.api_server_count or 1
        self._tokenizers = [Unit((("tokenizer", i),), Backoff(most)) for i in range(tokenizers)]
        self._frontends = [Unit((("frontend", i),), Backoff(most)) for i in range(frontends)]
        self.units = [self._engine, *self._tokenizers, *self._frontends]
        self._unit_of = {name: unit for unit in self.units for name in unit.names}
        self._resolved: Resolved | None = None
        self._state = ServerState("loading", "the model is being loaded")
        self._engine_of: dict[int, int] = {}  # tokenizer → incarnation of the engine it works with
        self._probing: set[int] = set()  # front ends that have a token made
        self._spawned_at = time.monotonic()
        self._loading_seconds = 0.0  # from starting the engine core to the first token
        self.is_serving = False
        self.is_asleep = False  # the engine core is away, and stays so until it is wanted

    # --------------------------------------------------------------------------- coming up

    def spawn_all(self) -> None:
        """Start every process, the one that loads longest first."""
        for unit in self.units:
            self._spawn(unit)
        self._tell_state(self._state)

    def launch(self, resolved: Resolved) -> None:
        """Tell every process what to run."""
        self._resolved = resolved
        for unit in self.units:
            unit.num_news += 1
        self._group.broadcast(Launch(resolved, probe=True))

    def news(self) -> dict[Name, int]:
        """Return how much news those have given whose loading the server waits for, by the process
        that is to give the next. Whoever loads after the engine is waited for once that is up.
        """
        if self._resolved is None:
            return {("supervisor", 0): self._tree.num_news}
        loading = [unit for unit in self.units if unit.state is State.LOADING]
        if self._engine in loading:
            loading = [self._engine]
        return {unit.awaited: unit.num_news for unit in loading}

    def incarnation(self, role: str, index: int) -> int:
        """Return which incarnation of a process is the present one."""
        return self._unit_of[role, index].incarnation

    def take_ready(self, message: Ready) -> None:
        """Take in that a process can work."""
        name = message.role, message.index
        unit = self._unit_of[name]
        unit.ready.add(name)
        unit.num_news += 1
        if message.role == "tokenizer":
            self._engine_of[message.index] = message.engine
        if unit.state is State.LOADING and unit.ready.issuperset(unit.names):
            unit.state = State.UP
            if unit is not self._engine:  # which has yet to make a token
                unit.backoff.after_success()
            if unit.incarnation:
                self._welcome(unit)
        self._go_on()

    def take_probed(self, message: Probed) -> None:
        """Take in that a token has come round, or why not."""
        if message.index not in self._probing:
            return
        self._probing.discard(message.index)
        if message.problem and all(unit.state is State.UP for unit in self._tokenizers):
            reason = f"does not work: {message.problem}"
            self.lost(self._engine.names[0], self._engine.incarnation, reason)
        elif message.problem:
            self._probing.clear()  # a tokenizer died of or over it: once more, when it is back
        elif not self._probing:
            self._serve()

    def tell_progress(self, role: str, index: int, text: str) -> None:
        """Take in that a start gets on; let clients know how far the first one is."""
        if role != "supervisor":
            self._unit_of[role, index].num_news += 1
        if not self._tree.has_served:
            reason = f"the model is being loaded ({role}: {text})"
            self._tell_state(ServerState("loading", reason))

    def _go_on(self) -> None:
        """Have a token made as soon as there is someone at each place of the ring."""
        if self.is_serving or self._probing or self._tree.is_ending:
            return
        needed = [self._engine] if self._tree.has_served else self.units
        if any(unit.state is not State.UP for unit in needed):
            return
        tokenizers = [unit for unit in self._tokenizers if unit.state is State.UP]
        frontends = [unit for unit in self._frontends if unit.state is State.UP]
        engines = {self._engine_of.get(unit.index) for unit in tokenizers}
        if engines == {self._engine.incarnation} and frontends:
            self._probing = {unit.index for unit in frontends}
            for unit in frontends:
                self._group.send("frontend", unit.index, Probe())
            self._loop.call_later(PROBE_SECONDS, self._miss_token, self._engine.incarnation)

    def _miss_token(self, incarnation: int) -> None:
        if not self.is_serving and not self._tree.is_ending:
            reason = f"does not work: no token came within {PROBE_SECONDS:g} s"
            self.lost(self._engine.names[0], incarnation, reason)

    def _serve(self) -> None:
        now = time.monotonic()
        self._loading_seconds = now - self._spawned_at
        if self._engine.incarnation and not self.is_serving:
            logger.info("serving again, %.2f s after the loss", now - self._engine.lost_at)
        self.is_serving = self._tree.has_served = True
        self._engine.backoff.after_success()
        self._group.send("engine", 0, ServerState("ready"))
        self._tell_state(ServerState("ready"))
        self._tree.wake()

    def _tell_state(self, state: ServerState) -> None:
        self._state = state
        self._group.broadcast(state, "frontend")

    # --------------------------------------------------------------------------- being lost

    def lost(self, name: Name, incarnation: int, reason: str) -> bool:
        """Take in that a process is dead or must die, and bring its unit up again.

        *reason* follows its name. Return whether it is news: what is said of a former incarnation
        is none, nor is a second reason.
        """
        unit = self._unit_of[name]
        if incarnation != unit.incarnation or unit.state is State.DOWN:
            return False
        place, absent = self._group.place(*name), self._group.absent()
        what = f"{name[0]} {name[1]}{place} {reason}{absent}"
        if not self._tree.has_served or self._tree.is_ending:
            self._tree.fail(what)
        else:
            self._lose(unit, what)
        return True

    def _lose(self, unit: Unit, what: str) -> None:
        self.take_down(unit)
        delay = unit.backoff.after_failure(unit.lost_at)
        self._tell_lost(unit, what, delay or 0.0)
        if delay is None:
            self._tree.fail(what if unit.backoff.most == 0 else f"{what}; it has failed too often")
            return
        logger.error("%s; restarting it %s", what, f"in {delay:g} s" if delay else "now")
        self._loop.call_later(delay, self._replace, unit)

    def take_down(self, unit: Unit) -> None:
        """Kill what is left of *unit*; its deaths are no news from now on."""
        unit.state, unit.lost_at = State.DOWN, time.monotonic()
        for role, index in unit.names:
            self._group.signal(role, index, signal.SIGKILL)
            self._tree.ready.pop((role, index), None)

    def _tell_lost(self, unit: Unit, what: str, delay: float) -> None:
        news = PeerLost(unit.role, unit.index, unit.incarnation, what)
        match unit.role:
            case "engine":
                self.is_serving = False
                self._probing.clear()
                self._group.broadcast(news, "tokenizer")
                least, most = RETRY_SECONDS
                seconds = min(most, max(least, math.ceil(delay + self._loading_seconds)))
                self._tell_state(ServerState("restarting", f"{what}; it is restarted", seconds))
            case "tokenizer":
                self._engine_of.pop(unit.index, None)
                self._group.broadcast(news, "frontend")
                self._group.broadcast(news, "engine")
            case "frontend":
                self._group.broadcast(news, "tokenizer")
                self._probing.discard(unit.index)

    # --------------------------------------------------------------------------- sleep

    def sleep(self) -> None:
        """Give up engine core and worker, and with them all of the model's memory, until
        ``wake_up``; open requests end with an error.
        """
        if not self.is_serving:
            return
        logger.info("going to sleep: the model's memory is given up")
        self.is_asleep = True
        unit = self._engine
        self.take_down(unit)
        self.is_serving = False
        reason = "the server sleeps, POST /wake_up wakes it"
        news = PeerLost(unit.role, unit.index, unit.incarnation, reason)
        self._group.broadcast(news, "tokenizer")
        self._tell_state(ServerState("sleeping", reason, RETRY_SECONDS[1]))
        self._tree.wake()

    def wake_up(self) -> None:
        """Load the model again after ``sleep``."""
        if not self.is_asleep:
            return
        logger.info("waking up: the model is loaded again")
        self.is_asleep = False
        least, most = RETRY_SECONDS
        seconds = min(most, max(least, math.ceil(self._loading_seconds)))
        self._tell_state(ServerState("loading", "the server wakes up", seconds))
        self._engine.lost_at = time.monotonic()
        self._replace(self._engine)

    # --------------------------------------------------------------------------- replacing

    def _replace(self, unit: Unit) -> None:
        """Start the successor of *unit*, once the last of its processes is gone."""
        sleeps = unit is self._engine and self.is_asleep
        if self._tree.is_ending or unit.state is not State.DOWN or sleeps:
            return
        left = [name for name in unit.names if name in self._group.alive]
        if left and time.monotonic() - unit.lost_at > KILL_SECONDS:
            role, index = left[0]
            self._tree.fail(f"{role} {index} cannot be killed: the system holds it")
        elif left:
            self._loop.call_later(REAP_SECONDS, self._replace, unit)
        else:
            unit.incarnation += 1
            unit.state = State.LOADING
            unit.num_news += 1
            unit.ready.clear()
            self._start_successor(unit)

    def _start_successor(self, unit: Unit) -> None:
        assert self._resolved is not None, "nothing is replaced before the launch"
        if unit is self._engine:
            self._spawned_at = time.monotonic()
        try:
            self._spawn(unit)
        except OSError as error:
            self.lost(unit.names[0], unit.incarnation, f"cannot be started: {error}")
            return
        changed = [(*name, each.incarnation) for name, each in self._unit_of.items()]
        launch = Launch(self._resolved, [each for each in changed if each[2]], unit is self._engine)
        for role, index in unit.names:
            self._group.send(role, index, launch)
        news = PeerUp(unit.role, unit.index, unit.incarnation)
        if unit.role == "tokenizer":
            self._group.broadcast(news, "engine")
        elif unit.role == "frontend":
            self._group.broadcast(news, "tokenizer")
            self._tell_newcomer(unit.index)

    def _tell_newcomer(self, index: int) -> None:
        """Tell a new front end what the others know."""
        for unit in self._tokenizers:
            if unit.state is not State.UP:
                lost = PeerLost("tokenizer", unit.index, unit.incarnation, "it is restarted")
                self._group.send("frontend", index, lost)
        self._group.send("frontend", index, self._state)

    def _welcome(self, unit: Unit) -> None:
        """Let the others use a successor that is ready."""
        if unit.role == "tokenizer":
            news = PeerUp("tokenizer", unit.index, unit.incarnation)
            self._group.broadcast(news, "frontend")
        if unit is not self._engine:
            seconds = time.monotonic() - unit.lost_at
            logger.info("%s %d is back, %.2f s after the loss", unit.role, unit.index, seconds)

    def _spawn(self, unit: Unit) -> None:
        for role, index in reversed(unit.names):  # workers, which load longest, before their core
            fds: tuple[int, ...] = ()
            environment: dict[str, str] = {}
            if role == "frontend":
                fds = self._listener.filenos(index)
                environment = self._listener.environment(index) | self._ui
            self._group.spawn(
                role, index, incarnation=unit.incarnation, pass_fds=fds, env=environment
            )

    def give_up_loading(self) -> None:
        """Kill what is loading: the server is to end, and it could not be told to leave."""
        for unit in self.units:
            if self._tree.has_served and unit.state is State.LOADING:
                self.take_down(unit)
