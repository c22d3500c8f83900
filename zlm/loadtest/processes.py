"""A load from several client processes: they share it out and start together.

One process is enough up to some tens of thousands of events a second.
"""

import multiprocessing
import signal
from dataclasses import replace
from multiprocessing.connection import Connection

from zlm.errors import Internal
from zlm.loadtest.client import Progress, Seen, Work, run_here
from zlm.loadtest.stream import clock

START_SECONDS = 0.02  # from the last process's being ready to the start


def run(work: Work, processes: int = 1, tell: Progress | None = None) -> Seen:
    """Run *work* in *processes* processes; with one, in this, and then *tell* is told of it.

    Raises Internal if one of several dies.
    """
    parts = _shares(work, min(processes, work.pace.concurrency or processes))
    if len(parts) == 1:
        return run_here(work, tell=tell)
    context = multiprocessing.get_context("spawn")
    started = []
    for part in parts:
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, part), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        for _, pipe in started:
            pipe.recv()  # it is ready
        start_at = clock() + START_SECONDS
        for _, pipe in started:
            pipe.send(start_at)
        seen = [pipe.recv() for _, pipe in started]
    except (EOFError, ConnectionError) as error:
        raise Internal("a process of the client died") from error
    finally:
        for process, _ in started:
            process.kill()  # those that sent what they saw have ended, or have no more to do
            process.join()
    records = [record for each in seen for record in each.records]
    return Seen(records, sum(each.cpu_seconds for each in seen), len(seen))


def _child(pipe: Connection, work: Work) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    pipe.send(None)
    pipe.send(run_here(work, pipe.recv()))


def _shares(work: Work, processes: int) -> list[Work]:
    """Share *work* out: each gets every n-th conversation and its part of the concurrency."""
    return [
        replace(
            work,
            pace=replace(work.pace, concurrency=(work.pace.concurrency + at) // processes),
            conversations=work.conversations[at::processes],
            arrivals=work.arrivals[at::processes],
        )
        for at in range(processes)
    ]
