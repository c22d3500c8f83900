"""A server that a command has for itself, on a Unix socket.

A process of its own with a log of its own; it ends with whoever started it. Knows nothing of what
it is asked.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from zlm.errors import Internal
from zlm.process.linux import kill_when_parent_ends
from zlm.process.runtime import create, remove_stale

PREFIX = "zlm-own-"  # of its folder, which is locked while its owner lives
FAULTS = ("zlm: ", "zlm serve: ")  # how the line begins that says why a server has ended
STOP_SECONDS = 10.0
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class OwnServer:
    """A context manager: the server lives within it."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        _leave_at_signals()
        parent = Path(tempfile.gettempdir())
        folder, self._lock_fd = create(parent, PREFIX)
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        remove_stale(parent, PREFIX)
        self.socket = folder / "http"
        self._log = folder / "log"
        command = [sys.executable, "-m", "zlm.cli.main", "serve", model, "--uds", str(self.socket)]
        command += ["--shutdown-timeout", "0"]  # who ends us early wants no more answers
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: it ends when we say so
                preexec_fn=kill_when_parent_ends,
            )

    def __enter__(self) -> "OwnServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._remove()
        os.close(self._lock_fd)

    def check(self) -> None:
        """Raise Internal, with the reason that it gave, if it has ended."""
        status = self._process.poll()
        if status is None:
            return
        lines = self._log.read_text(errors="replace").splitlines()
        for line in reversed(lines):
            for start in FAULTS:
                if line.startswith(start):
                    raise Internal(line.removeprefix(start))
        last = f"; it said last: {lines[-1]}" if lines else ""
        raise Internal(f"the server has ended with status {status}{last}")


def _leave_at_signals() -> None:
    """Have SIGTERM and SIGHUP end this process in good order, unless they are ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in END_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    for each in END_SIGNALS:  # it is leaving already
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
