"""The last requests of each front end: when, how long, how many tokens, how they ended.

A front end keeps its last ``SLOTS`` requests for the model's work on a page of its own, a mapped
file in the runtime directory, so that any front end can show those of all. Nothing that a client
has written is in it. Slots are written in turn; a slot is the length of its JSON, a checksum, and
the JSON. Who reads one that is being written sees that by the checksum, and leaves it out.
"""

import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from zlib import crc32

import msgspec

from zlm.frontend.exchange import Exchange

SLOTS = 64
SLOT_BYTES = 512
PREFIX = "recent-"
SHOWN = 50
_HEAD = Struct("<II")  # bytes of JSON, their checksum


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that is over. Times in seconds."""

    at: float  # since the epoch: its end
    route: str
    status: int
    seconds: float
    first: float = 0.0  # until its first token; 0.0: there was none
    prompt: int = 0  # tokens
    cached: int = 0
    output: int = 0
    sequences: int = 0
    stream: bool = False
    finish: str = ""
    problem: str = ""  # a word


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Ended)


class RecentRequests:
    """The writing end of one page; in this process's memory alone without a *runtime*."""

    def __init__(self, index: int, runtime: Path | None = None) -> None:
        """Raises OSError if there is no room for the page."""
        self._runtime = runtime
        size = SLOTS * SLOT_BYTES
        self._page = memoryview(bytearray(size))
        if runtime is not None:
            self._page = _map(runtime / f"{PREFIX}{index}", size)
        self._next = 0
        self._read: dict[bytes, Ended] = {}  # what newest() found the last time, by its JSON

    def note(self, exchange: Exchange) -> None:
        """Keep the facts of *exchange*, which is over."""
        data = _encode(_ended(exchange))
        if len(data) > SLOT_BYTES - _HEAD.size:
            return  # of no route of ours
        start = self._next * SLOT_BYTES
        body = start + _HEAD.size
        self._page[body : body + len(data)] = data
        _HEAD.pack_into(self._page, start, len(data), crc32(data))
        self._next = (self._next + 1) % SLOTS

    def newest(self) -> list[Ended]:
        """Return the last requests of all front ends, the newest first."""
        pages: Iterable[bytes] = [bytes(self._page)]
        if self._runtime is not None:
            pages = [path.read_bytes() for path in self._runtime.glob(f"{PREFIX}*")]
        before, self._read = self._read, {}
        for page in pages:
            for data, checksum in _slots(page):
                ended = before.get(data)
                if ended is None and crc32(data) == checksum:
                    ended = _decoder.decode(data)
                if ended is not None:
                    self._read[data] = ended
        return sorted(self._read.values(), key=lambda ended: -ended.at)[:SHOWN]


def _map(path: Path, size: int) -> memoryview:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return memoryview(mmap.mmap(fd, size))
    finally:
        os.close(fd)


def _slots(page: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield what each slot in use holds, and the checksum that it should have."""
    for start in range(0, len(page), SLOT_BYTES):
        length, checksum = _HEAD.unpack_from(page, start)
        if length:
            body = start + _HEAD.size
            yield page[body : body + length], checksum


def _ended(exchange: Exchange) -> Ended:
    record, now = exchange.record, time.monotonic()
    first = record.first_token_at - exchange.received if record.first_token_at else 0.0
    return Ended(
        at=round(time.time(), 6),
        route=exchange.route,
        status=exchange.status,
        seconds=round(now - exchange.received, 4),
        first=round(first, 4),
        prompt=exchange.num_prompt_tokens,
        cached=record.num_cached_tokens,
        output=exchange.num_output_tokens,
        sequences=record.num_sequences,
        stream=record.stream,
        finish=record.finish_reason,
        problem=_problem(exchange),
    )


def _problem(exchange: Exchange) -> str:
    """Return what went wrong, in a word of ours; empty if nothing did."""
    if exchange.client_gone:
        return "client gone"
    if exchange.fault:
        return "cut off"
    return exchange.record.rejection or ("failed" if exchange.record.failure else "")
