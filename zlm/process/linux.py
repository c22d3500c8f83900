"""What Python lacks of Linux: prctl's death signal and process name, memory and its want."""

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
NAME_BYTES = 15


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def kill_when_parent_ends() -> None:
    """Have the kernel kill this process when the *thread* that started it ends."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def set_process_name(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show for this process; cut to 15 bytes."""
    _prctl(PR_SET_NAME, name.encode()[:NAME_BYTES])


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory; 0 if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def memory_bytes(pid: int) -> int:
    """Return the resident memory of process *pid*; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
