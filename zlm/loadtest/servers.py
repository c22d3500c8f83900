"""A server under measurement: starting it, and what its whole process tree uses.

Reads /proc, so Linux only. Knows nothing of HTTP but that /health, or where there is none
/v1/models, answers 200 when the server is ready.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from zlm.errors import ConfigError, Internal
from zlm.process.linux import kill_when_parent_ends

PAGE_PATHS = ("/health", "/v1/models")
PORT = "{port}"  # in a command that starts a server
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 60.0
LOOK_SECONDS = 0.02


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tree(root: int) -> list[int]:
    """Return the ids of process *root* and all that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                parents[int(entry.name)] = int(fields[1])
    found = [root] if root in parents else []
    for pid in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system time that *pids* have used so far."""
    ticks = 0
    for pid in pids:
        fields = _stat(pid)
        ticks += int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / TICKS_A_SECOND


def memory_bytes(pid: int) -> tuple[int, int]:
    """Return (resident, proportional) set size: shared pages count fully, or by their share."""
    values = {"Rss:": 0, "Pss:": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, *rest = line.split()
        if name in values:
            values[name] = int(rest[0]) * 1024
    return values["Rss:"], values["Pss:"]


def gpu_memory_mib() -> int | None:
    """Return how much of the first GPU's memory is in use, None where there is no GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(said.split()[0])


def command_name(pid: int) -> str:
    """Return the module or program that *pid* runs, for a table."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return words[words.index("-m") + 1] if "-m" in words else " ".join(words[:3])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the command; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def serve_command(model: str, flags: Sequence[str]) -> list[str]:
    """Return the command that serves *model*, less its port."""
    script = Path(sys.executable).with_name("zlm")
    zlm = [str(script)] if script.exists() else [sys.executable, "-m", "zlm.cli.main"]
    return [*zlm, "serve", model, *flags]


class ServerProcess:
    """One server, from exec to its end. ``ready_seconds`` is the time it took to be ready."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Start *command* and wait until it is ready; raises Internal if it is not to be.

        Raises ConfigError for a command that cannot be run and a log that cannot be written.

        In it ``{port}`` stands for the port; without that it gets ``--port N``. *environment* is
        added to this process's; *log* is a file for what it logs, without which that goes to
        stderr.
        """
        self.port = free_port()
        self._log = log
        words = [word.replace(PORT, str(self.port)) for word in command]
        if list(command) == words:
            words += ["--port", str(self.port)]
        start = time.monotonic()
        self.started_at = time.time()  # of the exec, seconds since the epoch
        try:
            with log.open("wb") if log else nullcontext() as stderr:
                self.process = subprocess.Popen(
                    words,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=os.environ | dict(environment or {}),
                    preexec_fn=kill_when_parent_ends,
                )
        except OSError as error:
            raise ConfigError(f"{error.filename or words[0]}: {error.strerror}") from error
        try:
            self._wait(start + timeout_seconds)
        except BaseException:
            self.stop()
            raise
        self.ready_seconds = time.monotonic() - start

    def _wait(self, deadline: float) -> None:
        while not self._is_ready():
            if self.process.poll() is not None:
                raise Internal(f"the server left with status {self.process.returncode}{self._end}")
            if time.monotonic() > deadline:
                raise Internal(f"the server was not ready in time{self._end}")
            time.sleep(LOOK_SECONDS)

    @property
    def _end(self) -> str:
        """The last line of the log, to be put after what went wrong."""
        said = self._log.read_text(errors="replace").split("\n") if self._log else []
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        return f": {last.removeprefix('zlm: ')}" if last else ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _is_ready(self) -> bool:
        for path in PAGE_PATHS:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", path)
                status = connection.getresponse().status
            except (OSError, HTTPException):
                return False
            finally:
                connection.close()
            if status != 404:
                return status == 200
        return False

    def stop(self) -> float:
        """End the server by SIGTERM; return the seconds it took to leave."""
        start = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return time.monotonic() - start
