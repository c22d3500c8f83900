"""Takes API keys out of this process's command line, where every user of the machine could read it.

The kernel shows a process's arguments (``ps``, /proc/PID/cmdline) from the process's own memory, so
what is overwritten there is gone for good. Between the start of the program and this, some tens of
milliseconds, a key can be seen: a file or the environment never shows it.
"""

import ctypes
from pathlib import Path

SECRET_FLAGS = (b"--api-key", b"--admin-api-key")
_ARG_START = 48  # fields of /proc/PID/stat, counted from 1: see proc(5)
_ARG_END = 49
_COMMAND = 2  # the last field that may have spaces


def hide_keys() -> int:
    """Overwrite the values of flags that hold keys; return how many there were."""
    start, end = _arguments()
    memory = ctypes.string_at(start, end - start)
    spans = secret_spans(memory)
    for at, length in spans:
        ctypes.memmove(start + at, b"*" * length, length)
    return len(spans)


def secret_spans(memory: bytes) -> list[tuple[int, int]]:
    """Return where keys stand in *memory*, the arguments with a zero byte after each."""
    spans = []
    at = 0
    follows = False  # the argument before was a flag whose value comes next
    for argument in memory.split(b"\0"):
        flag, has_value, value = argument.partition(b"=")
        is_secret = flag.replace(b"_", b"-") in SECRET_FLAGS
        if follows and argument:
            spans.append((at, len(argument)))
        elif is_secret and value:
            spans.append((at + len(flag) + 1, len(value)))
        follows = is_secret and not has_value and not follows
        at += len(argument) + 1
    return spans


def _arguments() -> tuple[int, int]:
    """Return the addresses between which this process's arguments stand."""
    line = Path("/proc/self/stat").read_text()
    fields = line.rpartition(")")[2].split()
    first = _COMMAND + 1
    return int(fields[_ARG_START - first]), int(fields[_ARG_END - first])
