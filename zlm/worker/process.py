"""The worker process: ``python -m zlm.worker.process RUNTIME RANK``.

Loads the model, says that it is ready, then executes steps in the order they come until told to
stop. Owns its inbox and its way to the engine core; what is computed belongs to the model runner.
Waiting costs no CPU: with steps sent ahead, the next one is there before this one has ended.
"""

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from zlm.config import ParallelOptions
from zlm.ipc.sockets import Inbox, Outbox
from zlm.messages import Execute, Launch, Masks, Profile, Stop, ToWorker
from zlm.ops import cpu_process
from zlm.process import cluster, garbage, notes
from zlm.process.child import Child, run
from zlm.process.heartbeat import Heartbeat
from zlm.worker import kernel_farm, native_build, ranks
from zlm.worker.runner import Runner

QUIET_MS = 300  # without a message before anything is done that a step would have to wait for

log = logging.getLogger("zlm.worker")


def serve(child: Child) -> None:
    """Be worker number ``child.index``: the body of the process."""
    # Bound first, so that a Launch is taken whenever it comes. torch is imported here, not above,
    # because it takes seconds, in which this process already dies with its parent; and in a thread,
    # so that what the Launch asks for can begin meanwhile.
    inbox = child.inbox(ToWorker)
    cpu_process.prepare()
    ranks.prepare()
    garbage.pause()
    importing = threading.Thread(target=importlib.import_module, args=("zlm.worker.startup",))
    importing.start()
    launch = _wait_for_launch(inbox)
    farm = None
    if launch is not None:
        farm = kernel_farm.start_early(launch.resolved, child.index)
        native_build.start_early(launch.resolved)
    importing.join()
    garbage.resume()
    if launch is None:
        return
    from zlm.worker.parallel import leave
    from zlm.worker.profiler import StepProfiler
    from zlm.worker.startup import start

    began = time.monotonic()
    meeting = ranks.meeting(child.runtime, child.incarnation)
    if launch.resolved.config.parallel.nnodes > 1:
        meeting = meeting.with_name(cluster.meeting_name(child.runtime, child.incarnation))
    started = start(launch.resolved, child.index, child.say_progress, meeting, farm)
    garbage.settle()
    child.heartbeat.took(started.longest_step_seconds)
    engine, address = _meet_engine(child, inbox, launch.resolved.config.parallel)
    engine.send(msgspec.structs.replace(started.ready, address=address))
    if child.index == 0:
        facts = {"dtype": started.ready.dtype, **(started.memory or {})}
        notes.write(child.runtime, notes.MEMORY, facts)
    seconds = time.monotonic() - began
    detail = f"{started.ready.device}, {started.ready.dtype}, {seconds:.1f} s"
    child.say_ready(detail)
    on_gpu = launch.resolved.device == "cuda"
    tell = child.supervisor.send
    runner = StepProfiler(started.runner, child.index, on_gpu=on_gpu, tell=tell)
    teller = engine if started.answers else None
    work(inbox, teller, runner, child.heartbeat, runner.take, on_gpu=on_gpu)
    leave(child.context)


def _wait_for_launch(inbox: Inbox) -> Launch | None:
    """Return the Launch, or None if the process shall stop instead."""
    while True:
        for message in inbox.receive():
            match message:
                case Launch():
                    return message
                case Stop():
                    return None


def _meet_engine(child: Child, inbox: Inbox, parallel: ParallelOptions) -> tuple[Outbox, str]:
    """Return the way to the engine core, and where it finds *inbox*; empty: in its own runtime
    directory.

    It lives and dies with this process.
    """
    if child.index in parallel.workers_of(0):
        return child.outbox("engine", 0, child.incarnation), ""
    keys = cluster.read_keys(child.runtime, child.incarnation)
    head = cluster.head_address(parallel)
    address = inbox.listen(cluster.endpoint(cluster.own_address(head), "*"), keys)
    return Outbox(child.context, cluster.engine_at(head, parallel), keys=keys), address


def work(
    inbox: Inbox,
    engine: Outbox | None,
    runner: Runner,
    heartbeat: Heartbeat,
    profile: Callable[[Profile], None],
    *,
    on_gpu: bool = False,
) -> None:
    """Execute steps in order and send each result to the engine core, if given, until Stop.

    While a step runs on a device this spins, so that neither its end nor the next step waits for a
    timer; *on_gpu*, where the device idles meanwhile, also while a step waits for its masks. When
    nothing has come for ``QUIET_MS`` it does what can wait, a piece at a time until a message
    comes, and then sleeps.
    Steps sent after one that waits for its masks wait with it. *profile* has steps measured.
    """
    steps, has_spare_work, is_quiet = 0, True, False
    next_step: int | None = None
    held: deque[Execute] = deque()
    while True:
        running = runner.in_flight
        heartbeat.beat(running, steps)
        patience = (0 if is_quiet else QUIET_MS) if has_spare_work else None
        spins = running or (on_gpu and runner.awaits_masks)
        messages = inbox.receive(timeout_ms=0 if spins else patience)
        is_quiet = not (running or messages or runner.awaits_masks)
        if has_spare_work and is_quiet:
            has_spare_work = runner.use_idle_time()
        for message in messages:
            match message:
                case Execute():
                    if next_step not in (None, message.step):  # lost with a connection
                        raise RuntimeError(f"step {message.step} came, and {next_step} never did")
                    next_step = message.step + 1
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


def _send_ended(runner: Runner, engine: Outbox | None, heartbeat: Heartbeat) -> int:
    """Send the results of the steps that have ended; return their number."""
    count = 0
    while runner.in_flight and runner.done():
        result = runner.collect()
        if engine is not None:  # one rank answers, since all have the same samples
            engine.send(result)
        heartbeat.took(result.seconds)
        count += 1
    return count


if __name__ == "__main__":
    run("worker", serve)
