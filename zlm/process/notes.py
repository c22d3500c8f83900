"""Notes: what a process tells once of its start, as a small JSON file in the runtime directory.

A note has one writer; who may enter the runtime directory may read it, however much later it
came up. A note takes the place of the former one in one step. Knows nothing of what is told.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

PREFIX = "note-"
MEMORY = "memory"  # by the worker of rank 0: what its memory is planned for
START = "start"  # by the supervisor: what each process did until the server was ready


def write(runtime: Path, name: str, value: Any) -> None:
    """Let note *name* in *runtime* tell *value*, which JSON can hold."""
    path = runtime / f"{PREFIX}{name}"
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(value))
    draft.replace(path)


def read(runtime: Path, name: str) -> Any:
    """Return what note *name* tells; None if there is none."""
    try:
        return msgspec.json.decode((runtime / f"{PREFIX}{name}").read_bytes())
    except FileNotFoundError:
        return None


def stamp(runtime: Path, name: str) -> int:
    """Return a number that changes whenever note *name* is written; 0 if there is none."""
    try:
        return os.stat(runtime / f"{PREFIX}{name}").st_mtime_ns
    except FileNotFoundError:
        return 0
