"""Child processes for the tests of zlm.process: run as ``fake_child.py ROLE RUNTIME INDEX``."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from zlm.errors import ModelError
from zlm.messages import Drain, Drained, Launch, Progress, Ready, Stop
from zlm.process.child import Child, run
from zlm.process.linux import PR_SET_PDEATHSIG, _prctl

ACCEPTS = Launch | Drain | Stop


def serve(child: Child) -> None:
    """Say Ready with facts of this process, answer each Drain, leave at Stop."""
    inbox = child.inbox(ACCEPTS)
    facts = {
        "pid": os.getpid(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "ignored": [signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)],
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "environment": sorted(os.environ),
    }
    child.supervisor.send(Ready(child.role, child.index, json.dumps(facts)))
    steps = 0
    while True:
        for message in inbox.receive():
            steps += 1
            child.heartbeat.beat(work_pending=True, steps=steps)
            if isinstance(message, Stop):
                child.supervisor.send(Progress(child.role, child.index, "last words"))
                return
            child.supervisor.send(Drained(child.index))


def serve_by_lifeline(child: Child) -> None:
    """As serve, with the kernel's death signal switched off."""
    _prctl(PR_SET_PDEATHSIG, 0)
    serve(child)


def deaf(child: Child) -> None:
    """Never read a message."""
    child.supervisor.send(Ready(child.role, child.index))
    while True:
        time.sleep(60)


def break_down(child: Child) -> None:
    raise ValueError("first line\nsecond line")


def refuse(child: Child) -> None:
    raise ModelError("the checkpoint is damaged")


def break_in_thread(child: Child) -> None:
    threading.Thread(target=break_down, args=(child,)).start()
    while True:
        time.sleep(60)


def break_in_handler(child: Child) -> None:
    def handler(message: object) -> None:
        raise KeyError("unknown request")

    async def main() -> None:
        inbox = child.async_inbox(ACCEPTS, handler)
        child.supervisor.send(Ready(child.role, child.index))
        await asyncio.Event().wait()
        inbox.close()

    asyncio.run(main())


if __name__ == "__main__":
    bodies = {
        "serve": serve,
        "serve_by_lifeline": serve_by_lifeline,
        "deaf": deaf,
        "break_down": break_down,
        "refuse": refuse,
        "break_in_thread": break_in_thread,
        "break_in_handler": break_in_handler,
    }
    run(sys.argv[1], bodies[sys.argv[1]])
