"""The engine process: ``python -m zlm.engine.process RUNTIME 0``.

Owns the sockets around one ``EngineCore`` and the clock it is given. One thread, one loop:

    take what has come  →  apply it  →  send the next steps  →  send the news

Steps go out before news: the workers' next step must never wait. With nothing to do the loop
sleeps in the inbox and uses no CPU (it wakes once to log what was done); with ``run_ahead_steps``
in flight it sleeps there as well, because the workers hold their next step already: it does not
spin (bench/LOG.md, 2026-11-29).
"""

import logging
import time
from typing import Any

import msgspec
import zmq

from zlm.engine.activity import Activity
from zlm.engine.core import EngineCore, Outputs, fewest_blocks
from zlm.engine.stats import clear_gauges
from zlm.engine.tokenizers import Tokenizers
from zlm.ipc.sockets import Inbox, Outbox
from zlm.messages import (
    WAITING,
    Abort,
    Administer,
    Administered,
    Launch,
    PeerLost,
    PeerUp,
    ServerState,
    StepResult,
    Stop,
    Submit,
    ToEngine,
    TokenBytes,
    WorkerReady,
)
from zlm.process import cluster, garbage
from zlm.process.child import Child, run
from zlm.process.counts import CountPage, path_of

COMPILING_MS = 2  # between two looks at grammars that are being compiled

logger = logging.getLogger(__name__)


class EngineProcess:
    """The loop around an engine core, and its ways to all peers."""

    def __init__(self, child: Child, inbox: Inbox, launch: Launch) -> None:
        resolved = launch.resolved
        config = resolved.config
        self._child = child
        self._inbox = inbox
        self._resolved = resolved
        self._probe = launch.probe
        self._num_workers = config.parallel.num_workers
        self._workers: list[Outbox] = []  # once they have reported
        self._tokenizers = Tokenizers(child, launch)

    def serve(self, early: list[WorkerReady]) -> None:
        """Wait for the workers (*early* are those that have reported), then work until Stop."""
        page = CountPage(path_of(self._child.runtime, "engine", self._child.index))
        clear_gauges(page)
        parallel = self._resolved.config.parallel
        self._keys = None
        if parallel.nnodes > 1:
            self._keys = cluster.read_keys(self._child.runtime, self._child.incarnation)
            at = cluster.engine_at(cluster.head_address(parallel), parallel)
            try:
                self._inbox.listen(at, self._keys)
            except zmq.ZMQError as error:
                raise cluster.cannot_listen(at, error) from error
        if len(early) < self._num_workers:
            self._child.say_progress(f"{WAITING}the worker")
        ready = self._wait_for_workers(early)
        if not ready:
            return
        self._workers = [self._way_to(report) for report in ready]
        verify = logger.isEnabledFor(logging.DEBUG)
        core = EngineCore(
            self._resolved,
            fewest_blocks(ready),
            verify=verify,
            page=None if self._probe else page,  # a probe is no request that counts
        )
        core.show_gauges()
        announcement = core.ready(ready[0].device, ready[0].dtype)
        longest = announcement.max_sequence_tokens
        if longest < self._resolved.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens of one sequence, less than the context length of "
                "%d: longer requests are refused. Raise --kv-cache-memory-bytes, or lower "
                "--max-model-len",
                longest,
                self._resolved.max_model_len,
            )
        garbage.settle()
        announcement = msgspec.structs.replace(announcement, incarnation=self._child.incarnation)
        self._tokenizers.announce(announcement)
        blocks = " + ".join(str(count) for count in announcement.num_blocks) or "no"
        detail = f"{blocks} KV blocks, sequences of at most {longest} tokens"
        self._child.say_ready(detail)
        self._loop(core, page)

    def _wait_for_workers(self, ready: list[WorkerReady]) -> list[WorkerReady]:
        """Return the report of every worker, by rank; none if told to stop."""
        while len(ready) < self._num_workers:
            for message in self._inbox.receive():
                match message:
                    case WorkerReady():
                        ready.append(message)
                    case PeerUp() | PeerLost():
                        self._tokenizers.take(message)
                    case Stop():
                        return []
                    case _:
                        raise RuntimeError(f"{type(message).__name__} before EngineReady")
        return sorted(ready, key=lambda message: message.rank)

    def _way_to(self, worker: WorkerReady) -> Outbox:
        """Return an outbox to a worker, which lives and dies with this process."""
        if worker.address:
            return Outbox(self._child.context, worker.address, keys=self._keys)
        return self._child.outbox("worker", worker.rank, self._child.incarnation)

    def _loop(self, core: EngineCore, page: CountPage) -> None:
        statistics = core.scheduler.statistics
        self._activity = Activity(core.stats(), time.monotonic())
        while True:
            self._child.heartbeat.beat(not core.is_idle, statistics.steps)
            messages = self._inbox.receive(self._timeout_ms(core))
            self._child.heartbeat.beat(bool(messages) or not core.is_idle, statistics.steps)
            now = time.monotonic()
            outputs: Outputs = []
            for message in messages:
                if isinstance(message, Stop):
                    core.close()
                    return
                outputs += self._take(core, message, now, page)
            if core.num_compiling:
                outputs += core.take_compiled(now)
            for step in core.next_steps(now):
                for worker in self._workers:
                    worker.send(step)
            core.show_gauges()
            for owner, output in outputs:
                self._tokenizers.send(owner, output)
            if core.is_idle:
                core.check_idle()
            self._tell(core, now)

    def _take(self, core: EngineCore, message: Any, now: float, page: CountPage) -> Outputs:
        """Apply one message; return its news."""
        match message:
            case StepResult():
                return core.apply(message, now)
            case Submit():
                return core.submit(message) if self._tokenizers.knows(message.seq_id) else []
            case Abort():
                return core.abort(message, now)
            case TokenBytes():
                core.learn(message)
            case PeerUp() | PeerLost():
                if self._tokenizers.take(message):
                    core.abandon(message.index, now)
            case ServerState():
                core.count_in(page)
                self._activity = Activity(core.stats(), now)
            case Administer():
                done = Administered(message.call, core.reset_prefix_cache())
                self._child.supervisor.send(done)
            case _:
                raise RuntimeError(f"{type(message).__name__} is not for a running engine")
        return []

    def _tell(self, core: EngineCore, now: float) -> None:
        """Log how the engine is doing, if that is due."""
        self._activity.note(now, idle=core.is_idle)
        if self._activity.wait_seconds(now) == 0.0:
            line = self._activity.line(core.stats(), now)
            if self._resolved.config.log.stats:
                logger.info("%s", line.text, extra={"fields": line.fields})

    def _timeout_ms(self, core: EngineCore) -> int | None:
        """Return how long the loop may sleep; None: until a message comes."""
        if core.num_compiling:
            return COMPILING_MS
        seconds = self._activity.wait_seconds(time.monotonic())
        return None if seconds is None else int(1000 * seconds) + 1


def body(child: Child) -> None:
    """Be the engine core: the body of the process."""
    inbox = child.inbox(ToEngine)
    early: list[WorkerReady] = []
    launch: Launch | None = None
    while launch is None:
        for message in inbox.receive():
            match message:
                case Launch():
                    launch = message
                case WorkerReady():  # it was launched and ready before us
                    early.append(message)
                case Stop():
                    return
                case _:
                    raise RuntimeError(f"{type(message).__name__} before Launch")
    EngineProcess(child, inbox, launch).serve(early)


if __name__ == "__main__":
    run("engine", body)
