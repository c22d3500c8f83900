"""The heartbeat page: one fixed record a process in a small shared file, written by its owner.

This is how a hang is told from idleness without a message: a process whose ``last_loop_ns`` is old
while ``work_pending`` is set does not get on. Anyone who may enter the runtime directory may read.

A record is eight int64 words: pid, last loop (CLOCK_MONOTONIC, ns, the same clock in every
process), steps, work pending, index, one unused, and two that hold the role's name. Each word is
stored by one aligned 8-byte write, so no reader sees half of it. The pid is written last: a record
without one is empty.
"""

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "heartbeat"
WORD_BYTES = 8
RECORD_WORDS = 8
ROLE_BYTES = 16
PID, LAST_LOOP, STEPS, PENDING, INDEX, _UNUSED, ROLE = range(7)


@dataclass(frozen=True, slots=True)
class Beat:
    """What one record says."""

    role: str
    index: int
    pid: int
    last_loop_ns: int  # time.monotonic_ns() of the process's last loop
    steps: int  # steps done since the process started
    work_pending: bool  # whether it had work to do then

    def age_seconds(self, now_ns: int) -> float:
        """Return the seconds since the last loop; *now_ns* is time.monotonic_ns()."""
        return (now_ns - self.last_loop_ns) / 1e9


def create(runtime: Path, records: int) -> None:
    """Make an empty page of *records* records in *runtime*."""
    fd = os.open(runtime / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, records * RECORD_WORDS * WORD_BYTES)
    os.close(fd)


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
        self._bytes[ROLE * WORD_BYTES :] = name
        self._words[INDEX] = index
        self.beat(work_pending=False, steps=0)
        self._words[PID] = os.getpid()

    def beat(self, work_pending: bool, steps: int) -> None:
        """Say that the loop came round now, whether work waits, and the steps done so far."""
        words = self._words
        words[STEPS] = steps
        words[PENDING] = work_pending
        words[LAST_LOOP] = time.monotonic_ns()


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
        )
