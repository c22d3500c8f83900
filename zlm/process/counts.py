"""Count pages: what a process has counted, in a mapped file of the runtime directory.

Each process that counts owns one page and is the only one to write it; anyone who may enter the
runtime directory may read all of them at any time. That makes counts

- exact wherever they are asked for: every front end can add up all pages when /metrics is read;
- lasting: a page outlives its process, and a successor of the same role and index goes on where
  the former one stopped, however that one died. So a sum of pages never goes down.

A page is a header, ``CELLS`` float64 cells, and the names of the entries. An entry is a name and a
number of cells in a row; whole numbers are exact up to 2**53. Cells are stored by aligned 8-byte
writes, so no reader sees half of one. A new entry is written first and then counted in the header's
one word, so that neither a reader nor a successor meets an entry that is not whole. The file's
space is reserved when it is made: a full disk is an error at the start, not a signal later.

Knows nothing of what is counted.
"""

import mmap
import os
from collections import defaultdict
from pathlib import Path

CELLS = 4096
CELL_BYTES = 8
HEADER_BYTES = 64  # the first word: bytes of names in use
NAMES_AT = HEADER_BYTES + CELLS * CELL_BYTES
PAGE_BYTES = 128 * 1024
PREFIX = "counts-"
STARTS = "starts"  # an entry of every page: processes that have had it
OVERFLOW = "overflow"  # an entry of every page: what is counted when no cell is left

Values = dict[str, list[float]]  # of one page: the cells of each entry


def path_of(runtime: Path, role: str, index: int) -> Path:
    """Return where the page of process *role* number *index* is."""
    return runtime / f"{PREFIX}{role}-{index}"


class CountPage:
    """The writing end of one page; in this process's memory alone without a *path*.

    ``cells`` of an entry are a memoryview of float64: ``cells[0] += 1`` counts.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Open the page at *path*, with all that a former process counted, or make it.

        Raises OSError if there is no room for it.
        """
        self._bytes = memoryview(bytearray(PAGE_BYTES)) if path is None else _map(path)
        self._header = self._bytes[:HEADER_BYTES].cast("q")
        self._cells = self._bytes[HEADER_BYTES:NAMES_AT].cast("d")
        self._entries: dict[str, tuple[int, int]] = {}  # name → first cell and their number
        self._names_bytes = self._header[0]
        self._cells_used = 0
        for name, count in _entries(bytes(self._bytes[NAMES_AT:]), self._names_bytes):
            self._entries[name] = (self._cells_used, count)
            self._cells_used += count
        self.cells(OVERFLOW)
        self.cells(STARTS)[0] += 1

    def cells(self, name: str, count: int = 1) -> "memoryview[float]":
        """Return the cells of entry *name*; made, all zero, if there is none.

        Without room left these are the first cells of an entry that stands for all such.
        """
        entry = self._entries.get(name)
        if entry is None:
            entry = self._add(name, count)
        start, length = entry
        if length != count:
            raise ValueError(f"entry {name!r} has {length} cells, not {count}")
        return self._cells[start : start + length]

    def values(self) -> Values:
        """Return all entries as they are now."""
        return {n: list(self._cells[at : at + c]) for n, (at, c) in self._entries.items()}

    def _add(self, name: str, count: int) -> tuple[int, int]:
        line = f"{count}\t{name}\n".encode()
        end = NAMES_AT + self._names_bytes + len(line)
        if self._cells_used + count > CELLS or end > PAGE_BYTES:
            start = self._entries[OVERFLOW][0]
            assert count == 1, "only single counts are made as time goes by"
            return start, 1
        self._bytes[NAMES_AT + self._names_bytes : end] = line
        self._names_bytes += len(line)
        self._header[0] = self._names_bytes
        self._entries[name] = (self._cells_used, count)
        self._cells_used += count
        return self._entries[name]


def read(path: Path) -> Values:
    """Return all entries of the page at *path*; none if there is no such page."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    if len(data) < PAGE_BYTES:  # it is being made at this moment
        return {}
    cells = memoryview(data)[HEADER_BYTES:NAMES_AT].cast("d")
    values: Values = {}
    start = 0
    for name, count in _entries(data[NAMES_AT:], memoryview(data)[:8].cast("q")[0]):
        values[name] = list(cells[start : start + count])
        start += count
    return values


def read_all(runtime: Path) -> dict[str, dict[int, Values]]:
    """Return every page of *runtime*: by role, then by index."""
    pages: dict[str, dict[int, Values]] = defaultdict(dict)
    for path in sorted(runtime.glob(f"{PREFIX}*")):
        role, _, index = path.name.removeprefix(PREFIX).rpartition("-")
        pages[role][int(index)] = read(path)
    return pages


def _map(path: Path) -> memoryview:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        return memoryview(mmap.mmap(fd, PAGE_BYTES))
    finally:
        os.close(fd)


def _entries(names: bytes, used: int) -> list[tuple[str, int]]:
    lines = names[:used].decode().splitlines()
    return [(name, int(count)) for count, _, name in (line.partition("\t") for line in lines)]
