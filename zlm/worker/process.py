"""The worker process: ``python -m zlm.worker.process RUNTIME RANK``.

Loads the model, says that it is ready, then executes steps in the order they come until told to
stop. Owns its inbox and its way to the engine core; what is computed belongs to the model runner.
Waiting costs no CPU: with steps sent ahead, the next one is there before this one has ended.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from zlm.ipc.sockets import Inbox, Outbox
from zlm.messages import Execute, Launch, Masks, Profile, Stop, ToWorker
from zlm.ops import cpu_process
from zlm.process import garbage
from zlm.process.child import Child, run
from zlm.process.heartbeat import Heartbeat
from zlm.worker.runner import Runner

log = logging.getLogger("zlm.worker")


def serve(child: Child) -> None:
    """Be worker number ``child.index``: the body of the process."""
    # Bound first, so that a Launch is taken whenever it comes. torch is imported here, not above,
    # because it takes a second or two, in which this process already dies with its parent.
    inbox = child.inbox(ToWorker)
    cpu_process.prepare()
    from zlm.worker.profiler import StepProfiler
    from zlm.worker.startup import start

    launch = _wait_for_launch(inbox)
    if launch is None:
        return
    began = time.monotonic()
    started = start(launch.resolved, child.index, child.say_progress)
    garbage.settle()
    child.heartbeat.took(started.longest_step_seconds)
    engine = child.outbox("engine", 0, child.incarnation)  # it lives and dies with this one
    engine.send(started.ready)
    seconds = time.monotonic() - began
    detail = f"{started.ready.device}, {started.ready.dtype}, {seconds:.1f} s"
    child.say_ready(detail)
    on_gpu = launch.resolved.device == "cuda"
    tell = child.supervisor.send
    runner = StepProfiler(started.runner, child.index, on_gpu=on_gpu, tell=tell)
    work(inbox, engine, runner, child.heartbeat, runner.take)


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
    runner: Runner,
    heartbeat: Heartbeat,
    profile: Callable[[Profile], None],
) -> None:
    """Execute steps in order and send each result to the engine core, until Stop.

    While a step runs on a device this spins, so that neither its end nor the next step waits for a
    timer; with nothing in flight it does what can wait, and then sleeps until a message comes.
    Steps sent after one that waits for its masks wait with it. *profile* has steps measured.
    """
    steps, has_spare_work = 0, True
    held: deque[Execute] = deque()
    while True:
        running = runner.in_flight
        heartbeat.beat(running, steps)
        messages = inbox.receive(timeout_ms=0 if running or has_spare_work else None)
        if has_spare_work and not (running or messages or runner.awaits_masks):
            has_spare_work = runner.use_idle_time()
        for message in messages:
            match message:
                case Execute():
                    held.append(message)
                case Masks():
                    runner.mask(message)
                    steps += _send_ended(runner, engine, heartbeat)
                case Profile():
                    profile(message)
                case Stop():
                    return
            while held and not runner.awaits_masks:
                heartbeat.beat(True, steps)
                runner.launch(held.popleft())
                steps += _send_ended(runner, engine, heartbeat)
        steps += _send_ended(runner, engine, heartbeat)


def _send_ended(runner: Runner, engine: Outbox, heartbeat: Heartbeat) -> int:
    """Send the results of the steps that have ended; return their number."""
    count = 0
    while runner.in_flight and runner.done():
        result = runner.collect()
        engine.send(result)
        heartbeat.took(result.seconds)
        count += 1
    return count


if __name__ == "__main__":
    run("worker", serve)
