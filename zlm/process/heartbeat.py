"""The heartbeat page: one fixed record a process in a small shared file, written by its owner.

This is how a hang is told from idleness without a message (``zlm.process.watch`` does it). Anyone
who may enter the runtime directory may read. A record says three things:

- that the process runs at all: ``last_alive_ns``, written twice a second by a thread of its own, so
  that it stands still if the process is stopped or a C call holds Python's lock;
- that its loop goes round: ``last_loop_ns``;
- that work gets done: ``steps``, while ``work_pending`` is set. ``longest_step_ns`` says how long
  a step has been known to take, and so how patient an onlooker must be.

A record is 16 int64 words: pid, last loop (CLOCK_MONOTONIC, ns, the same clock in every process),
steps, work pending, index, last alive, longest step, two that hold the role's name, the rest
unused. Each word is stored by one aligned 8-byte write, so no reader sees half of it. The pid is
written last: a record without one is empty. Whoever starts a process in the place of another
clears the record first.
"""

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "heartbeat"
WORD_BYTES = 8
RECORD_WORDS = 16
ROLE_BYTES = 16
PID, LAST_LOOP, STEPS, PENDING, INDEX, LAST_ALIVE, LONGEST_STEP, ROLE = range(8)


@dataclass(frozen=True, slots=True)
class Beat:
    """What one record says."""

    role: str
    index: int
    pid: int
    last_loop_ns: int  # time.monotonic_ns() of the process's last loop
    steps: int  # steps done since the process started
    work_pending: bool  # whether it had work to do then
    last_alive_ns: int = 0  # time.monotonic_ns() when a thread of the process last ran
    longest_step_ns: int = 0  # the longest step so far


def create(runtime: Path, records: int) -> None:
    """Make an empty page of *records* records in *runtime*; OSError if there is no room for it."""
    path = runtime / FILE_NAME
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:  # room is taken now: where there is none, to write would be a fatal signal
        os.posix_fallocate(fd, 0, records * RECORD_WORDS * WORD_BYTES)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def clear(runtime: Path, record: int) -> None:
    """Empty a record whose process has ended."""
    start = record * RECORD_WORDS * WORD_BYTES
    _map(runtime)[start : start + WORD_BYTES] = bytes(WORD_BYTES)


def _map(runtime: Path) -> memoryview:
    with (runtime / FILE_NAME).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


class Heartbeat:
    """The writing end of one record. ``beat`` takes well under a microsecond."""

    def __init__(self, runtime: Path, record: int, role: str, index: int) -> None:
        start = record * RECORD_WORDS * WORD_BYTES
        self._bytes = _map(runtime)[start : start + RECORD_WORDS * WORD_BYTES]
        self._words = self._bytes.cast("q")
        name = role.encode()[:ROLE_BYTES].ljust(ROLE_BYTES, b"\0")
        self._bytes[ROLE * WORD_BYTES : ROLE * WORD_BYTES + ROLE_BYTES] = name
        self._words[INDEX] = index
        self._words[LONGEST_STEP] = 0
        self.beat(work_pending=False, steps=0)
        self.alive()
        self._words[PID] = os.getpid()

    def beat(self, work_pending: bool, steps: int) -> None:
        """Say that the loop came round now, whether work waits, and the steps done so far."""
        words = self._words
        words[STEPS] = steps
        words[PENDING] = work_pending
        words[LAST_LOOP] = time.monotonic_ns()

    def alive(self) -> None:
        """Say that this process runs; for the one thread that does nothing else."""
        self._words[LAST_ALIVE] = time.monotonic_ns()

    def took(self, seconds: float) -> None:
        """Say that a step took *seconds*."""
        longest = int(seconds * 1e9)
        if longest > self._words[LONGEST_STEP]:
            self._words[LONGEST_STEP] = longest


class HeartbeatReader:
    """The reading end of the whole page."""

    def __init__(self, runtime: Path) -> None:
        self._bytes = _map(runtime)
        self._words = self._bytes.cast("q")

    def beats(self) -> list[Beat]:
        """Return the record of every process that has written one."""
        records = range(0, len(self._words), RECORD_WORDS)
        return [self._read(at) for at in records if self._words[at + PID]]

    def beat(self, role: str, index: int = 0) -> Beat | None:
        """Return the record of one process; None if it has not written one."""
        for beat in self.beats():
            if beat.role == role and beat.index == index:
                return beat
        return None

    def _read(self, at: int) -> Beat:
        words = self._words
        name_at = (at + ROLE) * WORD_BYTES
        name = bytes(self._bytes[name_at : name_at + ROLE_BYTES])
        return Beat(
            role=name.rstrip(b"\0").decode(),
            index=words[at + INDEX],
            pid=words[at + PID],
            last_loop_ns=words[at + LAST_LOOP],
            steps=words[at + STEPS],
            work_pending=bool(words[at + PENDING]),
            last_alive_ns=words[at + LAST_ALIVE],
            longest_step_ns=words[at + LONGEST_STEP],
        )
