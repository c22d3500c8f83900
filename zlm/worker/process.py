"""The worker process: ``python -m zlm.worker.process RUNTIME RANK``.

Loads the model, says that it is ready, then executes steps in the order they come until told to
stop. Owns its inbox and its way to the engine core; what is computed belongs to the model runner.
Waiting costs no CPU: with steps sent ahead, the next one is there before this one has ended.
"""

import gc
import logging
import time
from collections.abc import Callable

from zlm.ipc.sockets import Inbox, Outbox
from zlm.messages import Execute, Launch, Progress, Ready, StepResult, Stop, ToWorker
from zlm.ops import cpu_process
from zlm.process.child import Child, run

log = logging.getLogger("zlm.worker")


def serve(child: Child) -> None:
    """Be worker number ``child.index``: the body of the process."""
    # Bound first, so that a Launch is taken whenever it comes. torch is imported here, not above,
    # because it takes a second or two, in which this process already dies with its parent.
    inbox = child.inbox(ToWorker)
    cpu_process.prepare()
    from zlm.worker.startup import start

    launch = _wait_for_launch(inbox)
    if launch is None:
        return
    began = time.monotonic()

    def say(text: str) -> None:
        child.supervisor.send(Progress(child.role, child.index, text))

    started = start(launch.resolved, child.index, say)
    gc.collect()
    gc.freeze()  # what is there now lives as long as the process: never look at it again
    engine = child.outbox("engine")
    engine.send(started.ready)
    seconds = time.monotonic() - began
    detail = f"{started.ready.device}, {started.ready.dtype}, {seconds:.1f} s"
    child.supervisor.send(Ready(child.role, child.index, detail))
    work(inbox, engine, started.runner.execute, child.heartbeat.beat)


def _wait_for_launch(inbox: Inbox) -> Launch | None:
    """Return the Launch, or None if the process shall stop instead."""
    while True:
        for message in inbox.receive():
            match message:
                case Launch():
                    return message
                case Stop():
                    return None


def work(
    inbox: Inbox,
    engine: Outbox,
    execute: Callable[[Execute], StepResult],
    beat: Callable[[bool, int], None],
) -> None:
    """Execute steps in order and send each result to the engine core, until Stop."""
    steps = 0
    while True:
        beat(False, steps)
        for message in inbox.receive():
            match message:
                case Execute():
                    beat(True, steps)
                    engine.send(execute(message))
                    steps += 1
                case Stop():
                    return


if __name__ == "__main__":
    run("worker", serve)
