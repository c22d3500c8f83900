"""A worker that computes nothing: it answers each step after the time that a GPU would have taken.

Stands in for ``zlm.worker.process`` under bench/ring.py, over the real inbox and the real protocol.
Tokens are random ordinary ids. The "device" executes steps one after another: a step begins when it
has come and the one before it has ended, so a step that comes late shows as a gap.

``ZLM_RING`` in the environment is the JSON of a ``Device``: seconds a step, by its rows.
"""

import logging
import os
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from zlm.config import Resolved
from zlm.ipc.sockets import Inbox
from zlm.messages import Execute, Launch, Ready, StepResult, Stop, ToWorker, WorkerReady
from zlm.process.child import Child, run

ENVIRONMENT = "ZLM_RING"
POOL_TOKENS = 1 << 16  # random ids made once
FIRST_TOKEN = 100  # below it stand special tokens
BREAK_SECONDS = 0.05  # a longer pause means that there was nothing to do
SPIN_SECONDS = 0.0002  # sleeping overshoots by 0.1 ms: the end of a step is waited for awake

logger = logging.getLogger("zlm.worker")


class Device(msgspec.Struct, frozen=True):
    """How long a step takes, in seconds."""

    base: float = 0.44e-3
    row: float = 10e-6  # each decode row
    prefill: float = 2.5e-3  # more if the step has prefill rows
    prefill_token: float = 1e-6
    scale: float = 1.0  # of everything

    def seconds(self, rows: int, tokens: int) -> float:
        """Return the time of a step of *rows* rows and *tokens* tokens."""
        seconds = self.base + self.row * rows
        if tokens > rows:
            seconds += self.prefill + self.prefill_token * tokens
        return seconds * self.scale


def num_blocks(resolved: Resolved) -> list[int]:
    """Return blocks enough for every sequence at a usual length."""
    tokens = min(resolved.max_model_len, 4096)
    blocks = resolved.max_num_seqs * (tokens // resolved.config.cache.block_size_tokens + 1)
    return [blocks + 1] * len(resolved.kv_groups)


def wait_until(end: float) -> None:
    """Wait for the time *end* on the clock of ``time.monotonic``."""
    rest = end - time.monotonic()
    if rest > SPIN_SECONDS:
        time.sleep(rest - SPIN_SECONDS)
    while time.monotonic() < end:
        pass


class Steps:
    """The device: executes steps one after another, each for the time it would take."""

    def __init__(self, device: Device, vocab_size: int) -> None:
        random = np.random.default_rng(0)
        self._pool = random.integers(FIRST_TOKEN, vocab_size, POOL_TOKENS).astype(np.int32)
        self._at = 0  # in the pool
        self._device = device
        self._end = 0.0  # of the last step, on the clock of time.monotonic
        self.num_done = 0
        self.num_late = 0  # that came when the one before had ended
        self.late_seconds = 0.0  # the device had nothing to do before them

    def execute(self, step: Execute, came: float) -> StepResult:
        """Wait until *step*, which was there at *came*, has ended, and return its result."""
        if 0.0 < came - self._end < BREAK_SECONDS:
            self.num_late += 1
            self.late_seconds += came - self._end
        self.num_done += 1
        rows = len(step.slots) // 4
        tokens = int(np.frombuffer(step.counts, np.int32).sum())
        self._end = max(self._end, came) + self._device.seconds(rows, tokens)
        wait_until(self._end)
        count = step.sample.count(1)
        if self._at + count > POOL_TOKENS:
            self._at = 0
        ids = self._pool[self._at : self._at + count]
        self._at += count
        return StepResult(step.step, ids.tobytes(), seconds=0.001)


def work(child: Child, inbox: Inbox, resolved: Resolved, device: Device) -> None:
    """Answer steps until Stop.

    As a worker with a stream does, it takes the next step before it has told of the last one: a
    step that has come by then begins where the last one ended.
    """
    steps = Steps(device, resolved.spec.vocab_size)
    engine = child.outbox("engine")
    engine.send(WorkerReady(0, num_blocks(resolved), "fake", "none"))
    child.supervisor.send(Ready(child.role, child.index, f"no model, {device}"))
    waiting: deque[Any] = deque()
    came = 0.0
    while True:
        if not waiting:
            waiting += inbox.receive()
            came = time.monotonic()
        message = waiting.popleft()
        if isinstance(message, Stop):
            logger.info(
                "%d of %d steps came late, by %.0f us on average",
                steps.num_late,
                steps.num_done,
                1e6 * steps.late_seconds / max(1, steps.num_late),
            )
            return
        result = steps.execute(message, came)
        came = 0.0
        waiting += inbox.receive(0)
        engine.send(result)


def serve(child: Child) -> None:
    """Be the worker: the body of the process."""
    inbox = child.inbox(ToWorker)
    device = msgspec.json.decode(os.environ[ENVIRONMENT], type=Device)
    while True:
        for message in inbox.receive():
            match message:
                case Launch():
                    work(child, inbox, message.resolved, device)
                    return
                case Stop():
                    return


if __name__ == "__main__":
    run("worker", serve)
