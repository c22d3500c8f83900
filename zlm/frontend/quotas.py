"""What each API key has used, exact over all front ends: a page in shared memory under a lock.

Rules. A key may make ``requests_per_minute`` requests in any 60 seconds; a request counts when it
is let in. It may use ``tokens_per_minute``: tokens count when their request is over, so requests
that run at the same time may together go over the limit, and the next ones wait until what was used
in the last 60 seconds is under it again. ``concurrency`` is how many requests may be open.

Uses are counted by the second: 61 seconds, the one under way among them, cover every interval of
60. So a use counts for at most one second too long and never too short.

    record of a key, int64 words:  digest 4 | second | sums 2 | requests 61 | tokens 61 | open 64
                                              │        └ of requests and of tokens
                                              └ of the last use: slots of later seconds are stale

The sums are added up anew with each new second, so that a front end that is killed between two
writes leaves them wrong for a moment only. ``open`` has a word for each front end, which sets its
own to zero when it starts: what a killed one held is not lost. Every look and every change is under
a lock of the kernel on the page's file, held for microseconds; it ends with its holder, however
that dies.

Without limits of keys there is no page and no lock.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zlm.api_keys import MAX_KEYS, ApiKey
from zlm.errors import QuotaExceeded, ZlmError

FILE_NAME = "quotas"
MAX_FRONT_ENDS = 64
WINDOW_SECONDS = 60
SLOTS = WINDOW_SECONDS + 1
MOST_WAIT_SECONDS = 60  # OpenAI's clients do not heed a Retry-After over it
SECOND, SUMS, SLOTS_AT = 4, 5, 7
REQUESTS, TOKENS = 0, 1  # what is counted
OPEN = SLOTS_AT + 2 * SLOTS
RECORD_WORDS = OPEN + MAX_FRONT_ENDS
RECORD_BYTES = RECORD_WORDS * 8
MAX_RECORDS = 4 * MAX_KEYS  # keys that the server has had since it started


class QuotaPage:
    """The records of all keys: in a file of *runtime*, or in this process's memory alone."""

    def __init__(self, runtime: Path | None = None) -> None:
        size = MAX_RECORDS * RECORD_BYTES
        self._fd = -1
        if runtime is None:
            memory = mmap.mmap(-1, size)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(runtime / FILE_NAME, flags, 0o600)
            os.ftruncate(self._fd, size)  # whoever comes first makes it so, for the others too
            memory = mmap.mmap(self._fd, size)
        self._bytes = memoryview(memory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other front ends from the page."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def record(self, key: ApiKey) -> memoryview:
        """Return the words of *key*'s record, made if there is none. The page must be locked."""
        digest = bytes.fromhex(key.sha256)
        empty = bytes(len(digest))
        for at in range(0, MAX_RECORDS * RECORD_BYTES, RECORD_BYTES):
            found = bytes(self._bytes[at : at + len(digest)])
            if found in (digest, empty):
                self._bytes[at : at + len(digest)] = digest
                return self._bytes[at : at + RECORD_BYTES].cast("q")
        raise RuntimeError(f"the server has had {MAX_RECORDS} keys with limits: restart it")


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a key may still use in this minute; None: it has no such limit."""

    requests: int | None
    tokens: int | None


class Quotas:
    """One front end's way to what the keys have used. *index* is its number."""

    def __init__(self, index: int, runtime: Path | None = None) -> None:
        self._index = index
        self._runtime = runtime
        self._page: QuotaPage | None = None
        self._records: dict[str, memoryview] = {}  # by digest, of keys with limits

    def configure(self, keys: Iterable[ApiKey]) -> None:
        """Take the keys that there are now; this front end has no request of a new one open."""
        limited = [key for key in keys if key.is_limited and key.sha256 not in self._records]
        if not limited:
            return
        if self._page is None:
            self._page = QuotaPage(self._runtime)
        with self._page.locked():
            for key in limited:
                record = self._page.record(key)
                record[OPEN + self._index] = 0
                self._records[key.sha256] = record

    def check(self, key: ApiKey, now: float) -> ZlmError | None:
        """Return why a request of *key* may not begin at *now* (monotonic seconds), or None."""
        record, page = self._records.get(key.sha256), self._page
        if record is None or page is None:
            return None
        with page.locked():
            return _refusal(key, record, int(now))

    def begin(self, key: ApiKey, now: float) -> Remaining:
        """Count a request of *key*, open from *now* on; raises QuotaExceeded if it may not be."""
        record, page = self._records.get(key.sha256), self._page
        if record is None or page is None:
            return Remaining(None, None)
        second = int(now)
        with page.locked():
            refusal = _refusal(key, record, second)
            if refusal is not None:
                raise refusal
            _count(record, REQUESTS, second, 1)
            record[OPEN + self._index] += 1
            return Remaining(
                _left(key.requests_per_minute, record, REQUESTS),
                _left(key.tokens_per_minute, record, TOKENS),
            )

    def end(self, key: ApiKey, tokens: int, now: float) -> None:
        """Count what a request that had begun has used, now that it is over."""
        record, page = self._records.get(key.sha256), self._page
        if record is None or page is None:
            return
        second = int(now)
        with page.locked():
            _forget_old(record, second)
            _count(record, TOKENS, second, tokens)
            record[OPEN + self._index] -= 1


def _slot(kind: int, second: int) -> int:
    return SLOTS_AT + kind * SLOTS + second % SLOTS


def _count(record: memoryview, kind: int, second: int, amount: int) -> None:
    record[_slot(kind, second)] += amount
    record[SUMS + kind] += amount


def _forget_old(record: memoryview, second: int) -> None:
    """Clear the slots of the seconds since the last use, which hold those of a minute before."""
    last = record[SECOND]
    if second <= last:  # clocks agree over processes; a reader may be late by a moment
        return
    for kind in (REQUESTS, TOKENS):
        for stale in range(max(last + 1, second - WINDOW_SECONDS), second + 1):
            record[_slot(kind, stale)] = 0
        start = SLOTS_AT + kind * SLOTS
        record[SUMS + kind] = sum(record[start : start + SLOTS])
    record[SECOND] = second


def _refusal(key: ApiKey, record: memoryview, second: int) -> ZlmError | None:
    _forget_old(record, second)
    wait = _wait(key.requests_per_minute, record, REQUESTS, second)
    if wait:
        return _exceeded(f"{key.requests_per_minute} requests a minute", wait)
    wait = _wait(key.tokens_per_minute, record, TOKENS, second)
    if wait:
        return _exceeded(f"{key.tokens_per_minute} tokens a minute", wait)
    num_open = sum(record[OPEN : OPEN + MAX_FRONT_ENDS])
    if key.concurrency is not None and num_open >= key.concurrency:
        return _exceeded(f"{key.concurrency} requests at once", 1)
    return None


def _exceeded(limit: str, seconds: int) -> ZlmError:
    message = f"this key may use {limit}; try again in {seconds} s"
    return QuotaExceeded(message, retry_after_seconds=seconds)


def _left(limit: int | None, record: memoryview, kind: int) -> int | None:
    return None if limit is None else max(0, limit - record[SUMS + kind])


def _wait(limit: int | None, record: memoryview, kind: int, second: int) -> int:
    """Return the seconds until another use is within *limit*; 0: it is so now."""
    if limit is None:
        return 0
    over = record[SUMS + kind] - limit + 1
    if over <= 0:
        return 0
    for seconds, oldest in enumerate(range(second - WINDOW_SECONDS, second + 1), 1):
        over -= record[_slot(kind, oldest)]
        if over <= 0:
            return min(seconds, MOST_WAIT_SECONDS)  # then this second no longer counts
    return MOST_WAIT_SECONDS
