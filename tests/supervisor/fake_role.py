"""A stand-in for any process of a server: run as ``fake_role.py ROLE RUNTIME INDEX``.

$FAKE_TRACE is a file that gets a line of each message; $FAKE_BEHAVIOUR is JSON: role to a list of
    not ready        never says Ready
    exit at launch   exits with status 3 when it gets Launch
    fatal at launch  raises ModelError when it gets Launch
    busy             front end: has a request that only ends when Drain says abort
    stuck            front end: never says Drained
    deaf to stop     does not leave at Stop
"""

import json
import os
import sys
from pathlib import Path

from zlm.errors import ModelError
from zlm.messages import Drain, Drained, Launch, Progress, Ready, ServerState, Stop
from zlm.process.child import Child, run

ACCEPTS = Launch | ServerState | Drain | Stop


def body(child: Child) -> None:
    behaviour = json.loads(os.environ["FAKE_BEHAVIOUR"]).get(child.role, [])
    inbox = child.inbox(ACCEPTS)
    trace("pid", child, os.getpid())
    if child.role == "frontend":
        os.fstat(int(os.environ["ZLM_LISTEN_FD"]))
    while True:
        for message in inbox.receive():
            if react(child, behaviour, message):
                return


def react(child: Child, behaviour: list[str], message: object) -> bool:
    """Do as a process of *behaviour* does at *message*; return whether it leaves."""
    match message:
        case Launch(resolved):
            trace("launch", child, resolved.model_path)
            if "exit at launch" in behaviour:
                os._exit(3)
            if "fatal at launch" in behaviour:
                raise ModelError("tensor x is missing\nfrom the file")
            child.supervisor.send(Progress(child.role, child.index, "weights 50%"))
            if "not ready" not in behaviour:
                child.supervisor.send(Ready(child.role, child.index, "a detail"))
        case ServerState(state, reason):
            trace(state, child, reason)
        case Drain(abort):
            trace("abort" if abort else "drain", child)
            if "stuck" not in behaviour and ("busy" not in behaviour or abort):
                child.supervisor.send(Drained(child.index))
        case Stop():
            trace("stop", child)
            return "deaf to stop" not in behaviour
    return False


def trace(event: str, child: Child, detail: object = "") -> None:
    line = json.dumps([event, child.role, child.index, detail]) + "\n"
    with Path(os.environ["FAKE_TRACE"]).open("a") as file:
        file.write(line)


if __name__ == "__main__":
    run(sys.argv[1], body)
