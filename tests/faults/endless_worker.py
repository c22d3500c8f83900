"""A worker whose start lives and never ends."""

import threading

from zlm.process.child import Child, run


def wait_for_ever(child: Child) -> None:
    child.say_progress("waiting for ever")
    threading.Event().wait()


if __name__ == "__main__":
    run("worker", wait_for_ever)
