"""A server that a command has for itself, on a Unix socket.

A process of its own with a log of its own; it ends with whoever started it. Knows nothing of what
it is asked.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zlm.errors import Internal
from zlm.process.linux import kill_when_parent_ends

TAIL_LINES = 12  # of its log, when it fails
STOP_SECONDS = 10.0


class OwnServer:
    """A context manager: the server lives within it."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        # No name that ``zlm.process.runtime`` gives, and takes away.
        self._folder = tempfile.TemporaryDirectory(prefix="zlm-own-")
        self.socket = Path(self._folder.name) / "http"
        self._log = Path(self._folder.name) / "log"
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
        self._folder.cleanup()

    def check(self) -> None:
        """Raise Internal, with the end of its log, if it has ended."""
        if self._process.poll() is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            raise Internal("the server has ended:\n" + "\n".join(lines))
