"""A ``zlm serve`` under measurement: starting it, and what its whole process tree uses.

Reads /proc, so Linux only. Knows nothing of HTTP but that /health answers 200 when ready.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHAPES = Path(__file__).with_name("shapes")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def model_and_flags(target: str, flags: list[str]) -> tuple[str, list[str]]:
    """Return what zlm serve is given for *target*: a model, or a shape with random weights.

    A shape has no tokenizer, unless *flags* bring one.
    """
    shape = SHAPES / target
    if Path(target).name != target or not shape.is_dir():  # a path is never a shape
        return target, flags
    without = [] if "--tokenizer" in flags else ["--skip-tokenizer-init"]
    return str(shape), ["--load-format", "dummy", *without, *flags]


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a bench's arguments at ``--``: its own, and the flags for zlm serve."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


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


def cpu_seconds(pids: list[int]) -> float:
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


class Server:
    """One ``zlm serve``, from exec to its end. ``ready_seconds`` is the time /health took."""

    def __init__(
        self,
        target: str,
        flags: list[str],
        *,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Start on a model or on a name of ``shapes`` and wait until it is ready.

        *environment* is added to this process's; *log* is a file for what the server logs.
        """
        self.port = free_port()
        start = time.monotonic()
        self.started_at = time.time()  # of the exec, seconds since the epoch
        model, flags = model_and_flags(target, flags)
        with log.open("wb") if log else nullcontext() as stderr:
            self.process = subprocess.Popen(
                [*self.command(model), "--port", str(self.port), *flags],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=os.environ | (environment or {}),
            )
        while not self._healthy():
            if self.process.poll() is not None:
                raise SystemExit(f"the server left with status {self.process.returncode}")
            if time.monotonic() - start > timeout_seconds:
                self.stop()
                raise SystemExit(f"the server was not ready after {timeout_seconds} s")
            time.sleep(0.02)
        self.ready_seconds = time.monotonic() - start

    def command(self, model: str) -> list[str]:
        """Return the command that serves *model*, less its flags."""
        script = Path(sys.executable).with_name("zlm")
        zlm = [str(script)] if script.exists() else [sys.executable, "-m", "zlm.cli.main"]
        return [*zlm, "serve", model]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> float:
        """End the server by SIGTERM; return the seconds it took to leave."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)
        return time.monotonic() - start
