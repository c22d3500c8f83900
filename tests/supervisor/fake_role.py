"""A stand-in for any process of a server: run as ``fake_role.py ROLE RUNTIME INDEX``.

$FAKE_TRACE is a file that gets a line of each message; $FAKE_BEHAVIOUR is JSON: role to a list of
    not ready        never says Ready
    never again      a successor never says Ready
    exit at launch   exits with status 3 when it gets Launch
    fatal at launch  raises ModelError when it gets Launch
    busy             front end: has a request that only ends when Drain says abort
    stuck            front end: never says Drained
    deaf to stop     does not leave at Stop
    dies again       a successor exits with status 3 when it gets Launch
    no token         front end: answers the first Probe with a problem
"""

import json
import os
import sys
from pathlib import Path

from zlm.errors import ModelError
from zlm.ipc.sockets import Outbox
from zlm.messages import (
    Drain,
    Drained,
    EngineReady,
    Launch,
    PeerLost,
    PeerUp,
    Probe,
    Probed,
    ServerState,
    Stop,
)
from zlm.process.child import Child, run

ACCEPTS = Launch | ServerState | Drain | Stop | PeerUp | PeerLost | Probe | EngineReady
BEAT_MS = 200
outboxes: list[Outbox] = []  # kept open


def body(child: Child) -> None:
    behaviour = json.loads(os.environ["FAKE_BEHAVIOUR"]).get(child.role, [])
    inbox = child.inbox(ACCEPTS)
    trace("pid", child, os.getpid())
    if child.role == "frontend":
        os.fstat(int(os.environ["ZLM_LISTEN_FD"]))
    early: list[EngineReady] | None = []  # which an engine may say before the supervisor's Launch
    while True:
        child.heartbeat.beat(work_pending=False, steps=0)
        for message in inbox.receive(BEAT_MS):
            if early is not None and isinstance(message, EngineReady):
                early.append(message)
                continue
            if react(child, behaviour, message):
                return
            if early is not None and isinstance(message, Launch):
                for ready in early:
                    react(child, behaviour, ready)
                early = None


def react(child: Child, behaviour: list[str], message: object) -> bool:
    """Do as a process of *behaviour* does at *message*; return whether it leaves."""
    match message:
        case Launch(resolved):
            trace("launch", child, resolved.model_path)
            if "dies again" in behaviour and child.incarnation:
                os._exit(3)
            if "exit at launch" in behaviour:
                os._exit(3)
            if "fatal at launch" in behaviour:
                raise ModelError("tensor x is missing\nfrom the file")
            child.say_progress("weights 50%")
            if "not ready" in behaviour or ("never again" in behaviour and child.incarnation):
                return False
            if child.role != "tokenizer":
                child.say_ready("a detail")
            if child.role == "engine":
                for index in range(resolved.num_tokenizers):
                    announce(child, index, message.incarnation("tokenizer", index))
        case EngineReady(incarnation=incarnation) if "not ready" not in behaviour:
            child.say_ready("a detail", engine=incarnation)
        case PeerUp(role, index, incarnation):
            trace("peer up", child, [role, index, incarnation])
            if child.role == "engine":
                announce(child, index, incarnation)
        case PeerLost(role, index, incarnation):
            trace("peer lost", child, [role, index, incarnation])
        case Probe():
            trace("probe", child)
            problem = "the first token is NaN" if "no token" in behaviour else ""
            child.supervisor.send(Probed(child.index, problem, child.incarnation))
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


def announce(child: Child, index: int, incarnation: int) -> None:
    """Be the engine core that tells a tokenizer it is ready."""
    tokenizer = child.outbox("tokenizer", index, incarnation)
    tokenizer.send(EngineReady([9], 64, incarnation=child.incarnation))
    outboxes.append(tokenizer)


def trace(event: str, child: Child, detail: object = "") -> None:
    line = json.dumps([event, child.role, child.index, detail]) + "\n"
    with Path(os.environ["FAKE_TRACE"]).open("a") as file:
        file.write(line)


if __name__ == "__main__":
    run(sys.argv[1], body)
