"""The engine process: ``python -m zlm.engine.process RUNTIME 0``.

Owns the sockets around one ``EngineCore`` and the clock it is given. One thread, one loop:

    take what has come  →  apply it  →  send the next steps  →  send the news

Steps go out before news: the workers' next step must never wait. With nothing to do the loop
sleeps in the inbox and uses no CPU; with ``run_ahead_steps`` in flight it sleeps there as well,
because the workers hold their next step already: it does not spin (bench/LOG.md, 2026-11-29).
"""

import logging
import time

from zlm.config import Resolved
from zlm.engine.core import EngineCore, Outputs, fewest_blocks
from zlm.ipc.sockets import Inbox
from zlm.messages import (
    Abort,
    Launch,
    Ready,
    StepResult,
    Stop,
    Submit,
    ToEngine,
    TokenBytes,
    WorkerReady,
)
from zlm.process import garbage
from zlm.process.child import Child, run

STATS_SECONDS = 0.25  # between two reports while it works
COMPILING_MS = 2  # between two looks at grammars that are being compiled

logger = logging.getLogger(__name__)


class EngineProcess:
    """The loop around an engine core, and its ways to all peers."""

    def __init__(self, child: Child, inbox: Inbox, resolved: Resolved) -> None:
        config = resolved.config
        self._child = child
        self._inbox = inbox
        self._resolved = resolved
        self._workers = [
            child.outbox("worker", rank) for rank in range(config.parallel.tensor_parallel_size)
        ]
        self._tokenizers = [
            child.outbox("tokenizer", index) for index in range(resolved.num_tokenizers)
        ]
        self._front_ends = [
            child.outbox("frontend", index) for index in range(resolved.num_front_ends)
        ]
        self._stats_at = 0.0  # time of the last report, seconds

    def serve(self, early: list[WorkerReady]) -> None:
        """Wait for the workers (*early* are those that have reported), then work until Stop."""
        ready = self._wait_for_workers(early)
        if not ready:
            return
        verify = logger.isEnabledFor(logging.DEBUG)
        core = EngineCore(self._resolved, fewest_blocks(ready), verify=verify)
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
        for tokenizer in self._tokenizers:
            tokenizer.send(announcement)
        for front_end in self._front_ends:
            front_end.send(core.stats())
        blocks = " + ".join(str(count) for count in announcement.num_blocks) or "no"
        detail = f"{blocks} KV blocks, sequences of at most {longest} tokens"
        self._child.supervisor.send(Ready(self._child.role, self._child.index, detail))
        self._loop(core)

    def _wait_for_workers(self, ready: list[WorkerReady]) -> list[WorkerReady]:
        """Return the report of every worker, by rank; none if told to stop."""
        while len(ready) < len(self._workers):
            for message in self._inbox.receive():
                match message:
                    case WorkerReady():
                        ready.append(message)
                    case Stop():
                        return []
                    case _:
                        raise RuntimeError(f"{type(message).__name__} before EngineReady")
        return sorted(ready, key=lambda message: message.rank)

    def _loop(self, core: EngineCore) -> None:
        statistics = core.scheduler.statistics
        while True:
            self._child.heartbeat.beat(not core.is_idle, statistics.steps)
            messages = self._inbox.receive(COMPILING_MS if core.num_compiling else None)
            now = time.monotonic()
            outputs: Outputs = []
            for message in messages:
                match message:
                    case StepResult():
                        outputs += core.apply(message, now)
                    case Submit():
                        outputs += core.submit(message)
                    case Abort():
                        outputs += core.abort(message, now)
                    case TokenBytes():
                        core.learn(message)
                    case Stop():
                        core.close()
                        return
                    case _:
                        raise RuntimeError(f"{type(message).__name__} is not for a running engine")
            if core.num_compiling:
                outputs += core.take_compiled(now)
            for step in core.next_steps(now):
                for worker in self._workers:
                    worker.send(step)
            for owner, output in outputs:
                self._tokenizers[owner].send(output)
            if core.is_idle:
                core.check_idle()
            if core.is_idle or now - self._stats_at >= STATS_SECONDS:
                self._report(core, now)

    def _report(self, core: EngineCore, now: float) -> None:
        self._stats_at = now
        stats = core.stats()
        for front_end in self._front_ends:
            front_end.send(stats)


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
    EngineProcess(child, inbox, launch.resolved).serve(early)


if __name__ == "__main__":
    run("engine", body)
