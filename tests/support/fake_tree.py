"""The real supervisor over fake processes, as a process of its own: what tests do with one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAKE_SERVER = Path(__file__).parent.parent / "supervisor" / "fake_server.py"
PATIENCE_SECONDS = 30.0


class Server:
    """A supervisor in a process of its own, its log, and what its children noted."""

    def __init__(
        self,
        folder: Path,
        *,
        behaviour: dict[str, list[str]] | None = None,
        resolver: str = "model",
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._trace = folder / "trace"
        self._trace.touch()
        self.runtimes = folder / "run"
        self.runtimes.mkdir()
        defaults = {"port": 0, "api_server_count": 2, "shutdown_timeout_seconds": 60}
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_SERVER), json.dumps(defaults | (options or {})), resolver],
            env={
                **os.environ,
                "RUNTIME_DIRECTORY": str(self.runtimes),
                "FAKE_TRACE": str(self._trace),
                "FAKE_BEHAVIOUR": json.dumps(behaviour or {}),
                **(environment or {}),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        """Read the log up to the line that has *text*; return it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"{text!r} is not in the log:\n" + "\n".join(self.lines))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end of the supervisor and of all that holds its stderr; return its status.

        Children inherit stderr, so its end is theirs.
        """
        assert self.process.stderr is not None
        self.lines += self.process.stderr.read().splitlines()
        return self.process.wait(PATIENCE_SECONDS)

    def events(self, *kinds: str) -> list[Any]:
        """Return what the children noted, of the given kinds, sorted within a kind."""
        noted = [json.loads(line) for line in self._trace.read_text().splitlines()]
        return [event for kind in kinds for event in sorted(noted) if event[0] == kind]

    def pids(self) -> dict[str, int]:
        """Return the process id of the newest process of each role, of index 0."""
        noted = [json.loads(line) for line in self._trace.read_text().splitlines()]
        return {e[1]: e[3] for e in noted if e[0] == "pid" and e[2] == 0}

    def close(self) -> None:
        """Kill it if it still runs; see that it has left nothing if it has ended by itself."""
        assert self.process.stderr is not None
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()
        if self.process.returncode >= 0:
            for pid in self.pids().values():
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
            assert list(self.runtimes.iterdir()) == []
