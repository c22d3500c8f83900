"""One request and its answer: whole in one write, or as a stream of events.

Owns the state of the answer; the connection owns the socket. Knows nothing of what is answered.
"""

import time
from collections.abc import Callable
from typing import Protocol

from zlm.errors import ZlmError
from zlm.frontend import response
from zlm.frontend.record import Record
from zlm.frontend.request import Request

CLIENT_GONE = 499  # never sent: what the log and the metrics call an answer nobody waited for
_CLOSE, _KEEP_ALIVE = b"close", b"keep-alive"


class Connection(Protocol):
    """What an exchange needs of its connection."""

    @property
    def writable(self) -> bool:
        """False while the socket is behind: what is written would only pile up."""

    def write(self, data: bytes) -> None:
        """Send *data*."""

    def answered(self, *, close: bool) -> None:
        """The answer is complete; go on to the next request, or close."""


class Exchange:
    """One request on its way through the server.

    The application answers it exactly once: ``respond``, ``respond_error``, or ``write`` any
    number of times and then ``end``. ``on_disconnect`` is called if the client goes away first;
    ``on_abort`` to end the answer with an error before its time; ``on_writable`` when a socket that
    was behind has caught up.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_held",
        "client_gone",
        "closing",
        "counted",
        "extra_headers",
        "fault",
        "names",
        "num_output_tokens",
        "num_prompt_tokens",
        "on_abort",
        "on_disconnect",
        "on_writable",
        "received",
        "record",
        "request",
        "request_id",
        "route",
        "status",
        "timeout_seconds",
    )

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._chunked = request.version == "1.1"
        self._held = b""  # the head of a stream, until its first frames go out with it
        self.request = request
        self.received = time.monotonic()
        self.closing = not request.keep_alive
        # Set by the application.
        self.route = ""
        self.request_id = ""
        self.extra_headers = b""
        self.counted = False  # for the quota of its key
        self.names: tuple[str, ...] = ()  # of the answer, by which it may be aborted
        self.timeout_seconds: float | None = None  # for the answer to be complete
        self.on_disconnect: Callable[[], None] | None = None
        self.on_abort: Callable[[ZlmError], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        # For the log.
        self.status = 0  # 0: nothing is answered yet
        self.client_gone = False  # before the end of its answer
        self.record = Record()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.fault = ""  # why an answer that began well did not end so

    @property
    def writable(self) -> bool:
        return self._connection.writable

    def respond(
        self,
        status: int,
        body: bytes = b"",
        *,
        content_type: bytes = response.JSON,
        headers: bytes = b"",
    ) -> None:
        """Answer with a whole body, in one write."""
        assert self.status == 0, "answered twice"
        self.status = status
        head = response.head(
            status,
            content_type=content_type if body else b"",
            length=len(body) if status != 204 else None,
            connection=self._connection_header(),
            extra=self._own_headers() + headers,
        )
        self._connection.write(head if self.request.method == "HEAD" else head + body)
        self._finish()

    def respond_error(self, error: ZlmError) -> None:
        """Answer with *error*'s status and OpenAI body."""
        self.record.note(error)
        body = response.error_body(error)
        self.respond(error.status, body, headers=response.error_headers(error))

    def write(self, data: bytes) -> None:
        """Send some of a stream of events; the first call begins the answer with status 200."""
        if self.status == 0:
            self._start()
        if self._chunked and not self._held:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._connection.write(self._framed(data))

    def end(self, data: bytes = b"", *, close: bool = False) -> None:
        """Send the last of a stream; with *close* the connection carries no more requests."""
        if self.status == 0:
            self._start()
        self.closing = self.closing or close
        last = self._framed(data) if data else self._held
        if self._chunked:
            last += b"0\r\n\r\n"
        if last:
            self._connection.write(last)
        self._finish()

    def limit_time(self, seconds: float | None) -> None:
        """Let the answer take *seconds* at most; of several limits the least holds."""
        if seconds is not None:
            self.timeout_seconds = min(seconds, self.timeout_seconds or seconds)

    def abort(self, error: ZlmError) -> None:
        """End the answer with *error*, if it is still awaited, and stop the work on it."""
        if self.on_abort is not None:
            self.on_abort(error)

    def disconnected(self) -> None:
        """The client is gone. Called by the connection, before ``finished`` is reported."""
        self.client_gone = True
        if self.status == 0:
            self.status = CLIENT_GONE
        callback, self.on_disconnect = self.on_disconnect, None
        self.on_abort = self.on_writable = None
        if callback is not None:
            callback()

    def _connection_header(self) -> bytes:
        if self.closing:
            return _CLOSE
        return _KEEP_ALIVE if self.request.version == "1.0" else b""

    def _own_headers(self) -> bytes:
        if not self.request_id:
            return self.extra_headers
        return b"%bx-request-id: %b\r\n" % (self.extra_headers, self.request_id.encode())

    def _start(self) -> None:
        self.status = 200
        if not self._chunked:
            self.closing = True  # HTTP/1.0 knows the end of a stream only by the close
        self._held = response.head(
            200,
            content_type=response.EVENT_STREAM,
            length=None,
            chunked=self._chunked,
            connection=self._connection_header(),
            extra=b"cache-control: no-cache\r\nx-accel-buffering: no\r\n" + self._own_headers(),
        )

    def _framed(self, data: bytes) -> bytes:
        held, self._held = self._held, b""
        if self._chunked:
            return b"%b%x\r\n%b\r\n" % (held, len(data), data)
        return held + data

    def _finish(self) -> None:
        self.on_abort = self.on_disconnect = self.on_writable = None
        self._connection.answered(close=self.closing)
