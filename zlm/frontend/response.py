"""Bytes of a response: status lines, headers, error bodies.

Status lines are made once. Knows nothing of sockets or routes.
"""

import time
from email.utils import formatdate
from http import HTTPStatus

import msgspec

from zlm.errors import MethodNotAllowed, ZlmError

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_encode = msgspec.json.Encoder().encode


class StandardHeaders:
    """The headers every response has. Keeps Date's text for the second it is true."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = b""

    def lines(self, now: float) -> bytes:
        """Return the Date and Server lines at *now* (``time.time()``)."""
        second = int(now)
        if second != self._second:
            self._second = second
            date = formatdate(second, usegmt=True)
            self._lines = f"date: {date}\r\nserver: zlm\r\n".encode()
        return self._lines


_standard = StandardHeaders()


def head(
    status: int,
    *,
    content_type: bytes = b"",
    length: int | None,
    chunked: bool = False,
    connection: bytes = b"",
    extra: bytes = b"",
) -> bytes:
    """Return status line and headers up to the blank line.

    *length* None means that the body's end is told by *chunked* coding or by the close of the
    connection. *extra* is whole header lines.
    """
    parts = [_STATUS_LINES[status], _standard.lines(time.time())]
    if content_type:
        parts.append(b"content-type: %b\r\n" % content_type)
    if length is not None:
        parts.append(b"content-length: %d\r\n" % length)
    elif chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    if connection:
        parts.append(b"connection: %b\r\n" % connection)
    parts.append(extra)
    parts.append(b"\r\n")
    return b"".join(parts)


def error_body(error: ZlmError) -> bytes:
    """Return the JSON body of *error*, one line."""
    return _encode(error.body())


def error_headers(error: ZlmError) -> bytes:
    """Return the header lines that go with *error*'s status."""
    lines = b""
    if error.status == 401:
        lines += b"www-authenticate: Bearer\r\n"
    if error.retry_after_seconds is not None:
        lines += b"retry-after: %d\r\n" % error.retry_after_seconds
    if isinstance(error, MethodNotAllowed):
        lines += b"allow: %b\r\n" % ", ".join(error.allow).encode()
    return lines
