"""The connection: an asyncio protocol that feeds the parser and answers one request at a time.

Rules.
* Requests are answered in the order they came. While one is being answered, or while the socket is
  behind with writing, what arrives is kept unparsed; past ``READ_AHEAD_BYTES`` reading is paused,
  so a client that sends faster than it reads is slowed by TCP, not by our memory. Up to there
  reading goes on, because a closed connection is only noticed by reading.
* One timer at a time: for an answer that may take so long only (504), or for what is to be read: a
  message that is under way (408), the next one, or the unread rest of a refused one, which is read
  and dropped for a moment so that the client gets to see the answer before the reset that closing
  with unread data would cause.
* A front end holds so many connections and no more: the one that has waited longest for a request
  gives way to a new one. Those that are being answered stay.
* A client that takes nothing of what is written to it for as long as an idle connection may last is
  cut off, so that it cannot hold a request open for ever.
* An end of file from the client means it is gone: what it waited for is cancelled.

Owns the socket. Knows nothing of routes or models.
"""

import asyncio
import logging
from collections import deque
from typing import Protocol, cast

from zlm.config import ServerLimits
from zlm.errors import DeadlineExceeded, Internal, RequestTimeout, ZlmError
from zlm.frontend.exchange import Exchange
from zlm.frontend.parser import BodyMemory, RequestParser
from zlm.frontend.request import Request
from zlm.frontend.response import CONTINUE

logger = logging.getLogger("zlm.frontend.protocol")

READ_AHEAD_BYTES = 64 * 1024
PIECE_BYTES = 64 * 1024  # fed to the parser at once; bounds the requests parsed ahead
LINGER_SECONDS = 2.0


class Application(Protocol):
    """What answers the requests. ``connections`` is the set of those that are open."""

    limits: ServerLimits
    connections: "set[HttpProtocol]"
    waiting: "dict[HttpProtocol, None]"  # those of them without a request, the longest first
    body_memory: BodyMemory
    closing: bool  # connections are closed once their request is answered

    def admit(self, request: Request) -> ZlmError | None:
        """Return why a request is refused before its body is read, or None."""

    def begin(self, exchange: Exchange) -> None:
        """Prepare *exchange*'s headers, before anything is answered."""

    def handle(self, exchange: Exchange) -> None:
        """Answer *exchange*, now or later. May raise ZlmError if nothing is answered yet."""

    def finished(self, exchange: Exchange) -> None:
        """Take note of an answer that is complete, or that nobody waits for any more."""


class HttpProtocol(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, application: Application, loop: asyncio.AbstractEventLoop) -> None:
        # Process.
        self._application = application
        self._loop = loop
        # Connection.
        self._transport = cast(asyncio.Transport, None)  # set by connection_made
        self._parser = RequestParser(
            lambda: application.limits, application.admit, application.body_memory
        )
        self._waiting: deque[Request] = deque()  # parsed, not begun
        self._unparsed = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._timed_message = False  # the timer is that of a message under way
        self._stall_timer: asyncio.TimerHandle | None = None  # runs while the socket is behind
        self._unsent_bytes = 0  # when the stall timer was set
        self._reading = True
        self._lingering = False
        self._gone = False
        self._running = False  # inside _run: no second run begins
        self.writable = True
        # Request.
        self._exchange: Exchange | None = None

    # -------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        application = self._application
        application.connections.add(self)
        application.waiting[self] = None
        self._set_timer()
        if len(application.connections) > application.limits.max_connections:
            next(iter(application.waiting)).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._parser.release()
        self._stop_timer()
        self._stop_stall_timer()
        self._application.connections.discard(self)
        self._application.waiting.pop(self, None)
        self._waiting.clear()
        self._unparsed.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnected()
            self._application.finished(exchange)

    def eof_received(self) -> bool:
        return False  # the transport sends what is buffered and closes

    def data_received(self, data: bytes) -> None:
        if self._lingering or self._gone:
            return
        self._unparsed += data
        if self._exchange is None and self.writable:
            self._run()
        elif len(self._unparsed) > READ_AHEAD_BYTES and self._reading:
            self._reading = False
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.writable = False
        self._watch_sending()

    def resume_writing(self) -> None:
        self.writable = True
        self._stop_stall_timer()
        if self._exchange is not None:
            if self._exchange.on_writable is not None:
                self._exchange.on_writable()
        else:
            self._run()

    # ---------------------------------------------------------------------- for the exchange

    def write(self, data: bytes) -> None:
        """Send *data*; what a client that is gone would have got is dropped."""
        if not self._gone:
            self._transport.write(data)

    def answered(self, *, close: bool) -> None:
        """Go on to the next request, or close."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "no request is being answered"
        self._application.finished(exchange)
        if self._gone:
            return
        self._application.waiting[self] = None
        if close or self._application.closing:
            self._close(linger=exchange.request.unread)
        elif not self._running:
            self._run()

    # -------------------------------------------------------------------- for the application

    @property
    def exchange(self) -> Exchange | None:
        """The request that is being answered."""
        return self._exchange

    def close_if_idle(self) -> None:
        """Close unless a request is being answered; then it closes after that one."""
        if self._exchange is None and not self._gone:
            self._close(linger=False)

    def abort(self) -> None:
        """Close at once, whatever is unsent."""
        if not self._gone:
            self._transport.abort()

    # ------------------------------------------------------------------------------ requests

    def _run(self) -> None:
        """Parse and answer for as long as there is something, and nothing to wait for."""
        self._running = True
        while self._exchange is None and self.writable and not self._transport.is_closing():
            if self._waiting:
                self._begin(self._waiting.popleft())
            elif self._unparsed and not self._parser.finished:
                piece = bytes(self._unparsed[:PIECE_BYTES])
                del self._unparsed[:PIECE_BYTES]
                self._parse(piece)
            else:
                break
        self._running = False
        if self._lingering or self._transport.is_closing():
            return
        if self._exchange is None and self.writable:
            if self._parser.take_continue():
                self._transport.write(CONTINUE)
            if not self._reading:
                self._reading = True
                self._transport.resume_reading()
        self._set_timer()

    def _parse(self, piece: bytes) -> None:
        try:
            ready = self._parser.feed(piece)
        except Exception:
            logger.exception("a request could not be taken in")
            ready = self._parser.time_out(Internal("the server failed to take in the request"))
        if ready:
            self._waiting.extend(ready)
            self._stop_timer()  # the next message's time starts anew

    def _begin(self, request: Request) -> None:
        exchange = self._exchange = Exchange(self, request)
        self._application.waiting.pop(self, None)
        if self._application.closing:
            exchange.closing = True
        try:
            self._application.begin(exchange)
            if request.error is not None:
                exchange.respond_error(request.error)
            else:
                self._application.handle(exchange)
        except ZlmError as error:
            exchange.respond_error(error)
        except Exception:
            logger.exception("%s %s failed", request.method, exchange.route)
            self._fail(exchange)

    def _fail(self, exchange: Exchange) -> None:
        """End *exchange* after a fault of ours, as well as what is already sent allows."""
        if self._exchange is not exchange:
            return
        if exchange.status == 0:
            exchange.respond_error(Internal("the server failed to handle the request"))
        else:
            self.abort()

    # ------------------------------------------------------------------------- end and timers

    def _close(self, *, linger: bool) -> None:
        self._stop_timer()
        self._waiting.clear()
        self._unparsed.clear()
        if not linger or not self._transport.can_write_eof():  # TLS reads on by itself
            self._transport.close()
            return
        self._lingering = True
        self._transport.write_eof()
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        self._timer = self._loop.call_later(LINGER_SECONDS, self._transport.abort)

    def _set_timer(self) -> None:
        """Time what the connection waits for: an answer, the rest of a message, or the next one."""
        if self._exchange is not None:
            self._stop_timer()
            seconds = self._exchange.timeout_seconds
            if seconds is not None:
                self._timer = self._loop.call_later(seconds, self._overdue)
            return
        limits = self._application.limits
        if self._parser.mid_message and self.writable:
            if not self._timed_message:
                self._stop_timer()
                self._timed_message = True
                self._timer = self._loop.call_later(limits.body_timeout_seconds, self._too_slow)
        else:
            self._stop_timer()
            if self.writable:
                self._timer = self._loop.call_later(limits.keep_alive_seconds, self._idle)

    def _stop_timer(self) -> None:
        self._timed_message = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        seconds = self._application.limits.body_timeout_seconds
        message = f"the request was not complete within {seconds:g} seconds"
        self._timer = None
        self._waiting.extend(self._parser.time_out(RequestTimeout(message)))
        self._run()

    def _overdue(self) -> None:
        self._timer = None
        exchange = self._exchange
        assert exchange is not None, "nothing is being answered"
        message = f"the answer was not complete within {exchange.timeout_seconds:g} seconds"
        exchange.abort(DeadlineExceeded(message))

    def _idle(self) -> None:
        """Close an idle connection, once its last answer has gone out."""
        self._timer = None
        if self._transport.get_write_buffer_size() and self._stall_timer is None:
            self._watch_sending()
        self._transport.close()

    def _watch_sending(self) -> None:
        """See to it that the client takes some of what is unsent, every once in a while."""
        self._unsent_bytes = self._transport.get_write_buffer_size()
        seconds = self._application.limits.keep_alive_seconds
        self._stall_timer = self._loop.call_later(seconds, self._check_sending)

    def _check_sending(self) -> None:
        if self._transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_sending()
        else:
            self._transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
