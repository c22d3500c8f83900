"""A parent to be killed: starts children of the given roles, says their pids, waits for ever.

Run as ``fake_parent.py RUNTIME FD ROLE...``; FD is inherited by the children too, so that its other
end tells when all are gone.
"""

import json
import sys
import time
from pathlib import Path

import zmq

from zlm.ipc.sockets import Inbox, address
from zlm.messages import ToSupervisor
from zlm.process.launch import ProcessGroup

FAKE_CHILD = Path(__file__).with_name("fake_child.py")


def fake_command(role: str) -> list[str]:
    return [sys.executable, "-P", str(FAKE_CHILD), role]


if __name__ == "__main__":
    runtime, fd, roles = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    context = zmq.Context()
    group = ProcessGroup(runtime, context, command=fake_command)
    inbox = Inbox(context, address(runtime, "supervisor"), ToSupervisor)
    for role in roles:
        group.spawn(role, 0, pass_fds=(fd,))
    ready: list[object] = []
    while len(ready) < len(roles):
        ready += inbox.receive()
    print(json.dumps([group.pid(role) for role in roles]), flush=True)
    time.sleep(600)
