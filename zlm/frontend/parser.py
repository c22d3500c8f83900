"""Bytes in, requests out: the HTTP/1 parser with its limits, over httptools.

Sans-IO: no socket, no loop, no clock. ``feed`` takes whatever arrived and returns the requests
that can now be answered, in order. A request that must be refused is returned with ``error`` set:

* at once, with ``unread`` set, when the rest of the connection cannot be trusted or is not worth
  reading (broken syntax, a body over the limit, a refused body the client has yet to send); the
  parser is then ``finished`` and takes nothing more;
* when its body is complete, where the refusal is not about the body and the body is small: it is
  dropped as it arrives and the connection lives.

Memory is bounded: headers by ``max_header_bytes`` plus one piece, bodies by ``max_body_bytes``, and
those that arrive at the same time on all connections by ``max_body_memory_bytes`` together.
What httptools (llhttp) itself refuses: Content-Length with Transfer-Encoding, a repeated or
malformed Content-Length, bare line feeds, folded headers, control characters.
"""

import re
from collections.abc import Callable

import httptools

from zlm.config import ServerLimits
from zlm.errors import BadRequest, BodyTooLarge, HeadersTooLarge, Overloaded, ZlmError
from zlm.frontend.request import Request

DROPPED_BODY_BYTES = 64 * 1024  # a refused request's body up to this is read and dropped
HEADER_OVERHEAD_BYTES = 4  # colon, space and line end, counted with each header

_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+;=:\[\]-]*")  # RFC 3986 3.2.2, less the comma
_UPGRADE_OPTIONS = (b"upgrade", b"http2-settings")


class BodyMemory:
    """The bytes of bodies that are arriving, over all connections of a process."""

    __slots__ = ("used_bytes",)

    def __init__(self) -> None:
        self.used_bytes = 0


class RequestParser:
    """Parses one connection's requests.

    *limits* is asked at the start of each request, because a connection may be older than the
    configuration. *admit* is asked once a request's headers are there, and returns why it is
    refused, or None. *memory* is shared with the other connections' parsers.
    """

    def __init__(
        self,
        limits: Callable[[], ServerLimits],
        admit: Callable[[Request], ZlmError | None],
        memory: BodyMemory | None = None,
    ) -> None:
        # Connection.
        self._current_limits = limits
        self._admit = admit
        self._memory = memory or BodyMemory()
        self._parser = httptools.HttpRequestParser(self)
        self._ready: list[Request] = []
        self.finished = False
        # Message.
        self._limits = limits()
        self.mid_message = False
        self._in_head = False
        self._upgrading = False
        self._request = Request()
        self._target = b""
        self._header_bytes = 0
        self._header_count = 0
        self._head_fed_bytes = 0
        self._continue = False
        self._held_bytes = 0  # of the body that is arriving: this parser's part of the memory

    def feed(self, data: bytes | memoryview) -> list[Request]:
        """Parse *data* and return the requests that may now be answered, oldest first."""
        if self.finished:
            return []
        began_in_head = self._in_head
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._take_ready() + self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self._refuse_rest(BadRequest(f"malformed HTTP request: {error}"))
        if began_in_head and self._in_head:
            self._head_fed_bytes += len(data)
            if self._head_fed_bytes > self._limits.max_header_bytes:
                self._refuse_rest(self._headers_too_large())
        return self._take_ready()

    def _without_upgrade(self, rest: bytes | memoryview) -> list[Request]:
        """Parse the current head again as if it had not asked for another protocol, then *rest*.

        A server may pass over Upgrade (RFC 9110 7.8); llhttp, having seen it, reads no body.
        """
        if self.finished:
            return []
        self._parser = httptools.HttpRequestParser(self)
        self._upgrading = False
        request = self._request
        lines = [f"{request.method} {request.target} HTTP/1.1".encode("latin-1")]
        for name, value in request.headers.items():
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(o for o in options if o.lower() not in _UPGRADE_OPTIONS)
            if name != b"upgrade":
                lines.append(name + b": " + value)
        ready = self.feed(b"\r\n".join(lines) + b"\r\n\r\n")
        return ready + self.feed(rest) if len(rest) else ready

    def take_continue(self) -> bool:
        """Return whether the client waits for "100 Continue"; true once a request."""
        waits, self._continue = self._continue, False
        return waits

    def time_out(self, error: ZlmError) -> list[Request]:
        """Give up on the message that is under way and return it, to be answered with *error*."""
        self._refuse_rest(error)
        return self._take_ready()

    def release(self) -> None:
        """Give back the memory of the body that is arriving: it is complete, or will not be."""
        self._memory.used_bytes -= self._held_bytes
        self._held_bytes = 0

    def _take_ready(self) -> list[Request]:
        ready, self._ready = self._ready, []
        return ready

    def _refuse_rest(self, error: ZlmError) -> None:
        """Answer the current request with *error* and listen to this connection no more."""
        if self.finished:
            return
        self.release()
        request = self._request if self.mid_message else Request()
        request.set_target(self._target)
        request.error = request.error or error
        request.body = b""
        request.unread = True
        request.keep_alive = False
        self._ready.append(request)
        self._in_head = self.mid_message = self._continue = False
        self.finished = True

    def _headers_too_large(self) -> ZlmError:
        limits = self._limits
        return HeadersTooLarge(
            f"the request line and headers exceed {limits.max_header_bytes} bytes "
            f"or {limits.max_header_count} headers"
        )

    # ------------------------------------------------------------------ callbacks of httptools

    def on_message_begin(self) -> None:
        if self.finished:
            return
        self._limits = self._current_limits()
        self._request = Request()
        self.mid_message = self._in_head = True
        self._target = b""
        self._header_bytes = self._header_count = self._head_fed_bytes = 0
        self._continue = False

    def on_url(self, url: bytes) -> None:
        if self.finished:
            return
        self._target += url
        self._count_header(len(url), 0)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.finished:
            return
        self._count_header(len(name) + len(value) + HEADER_OVERHEAD_BYTES, 1)
        if self.finished or not self._in_head:  # trailers are counted and dropped
            return
        headers = self._request.headers
        name = name.lower()
        if name in headers:
            if name == b"host":
                self._refuse_rest(BadRequest("more than one Host header"))
                return
            value = headers[name] + b", " + value
        headers[name] = value

    def _count_header(self, num_bytes: int, num_headers: int) -> None:
        self._header_bytes += num_bytes
        self._header_count += num_headers
        if (
            self._header_bytes > self._limits.max_header_bytes
            or self._header_count > self._limits.max_header_count
        ):
            self._refuse_rest(self._headers_too_large())

    def on_headers_complete(self) -> None:
        if self.finished:
            return
        self._in_head = False
        request = self._request
        parser = self._parser
        request.method = parser.get_method().decode("ascii")
        request.version = parser.get_http_version()
        request.keep_alive = parser.should_keep_alive()
        request.set_target(self._target)
        if parser.should_upgrade() and request.method != "CONNECT":
            self._upgrading = True
            return
        framing = self._check_framing(request)
        if framing is not None:
            self._refuse_rest(framing)
            return
        expects = request.headers.get(b"expect", b"").lower() == b"100-continue"
        request.error = self._admit(request)
        if request.error is None:
            self._continue = expects and request.version == "1.1"
        elif expects or not self._body_is_small(request):
            self._refuse_rest(request.error)

    def _check_framing(self, request: Request) -> ZlmError | None:
        """Return why host or extent of the message cannot be trusted, or its size is over the
        limit; or None.
        """
        if request.method == "CONNECT":
            return BadRequest("this is no proxy: CONNECT is not supported")
        if request.version not in ("1.1", "1.0"):
            return BadRequest(f"HTTP/{request.version} is not supported, use HTTP/1.1")
        host = request.headers.get(b"host")
        if host is None and request.version == "1.1":
            return BadRequest("a request of HTTP/1.1 needs a Host header")  # RFC 9112 3.2
        if host is not None and not _HOST.fullmatch(host):
            return BadRequest("the Host header is not a host")
        coding = request.headers.get(b"transfer-encoding")
        if coding is not None:
            # RFC 9112 6.1: a length in front of us may have been read otherwise.
            if request.version == "1.0":
                return BadRequest("Transfer-Encoding is not allowed in HTTP/1.0")
            if coding.strip().lower() != b"chunked":
                return BadRequest("Transfer-Encoding must be chunked and nothing else")
        length = int(request.headers.get(b"content-length", b"0"))
        if length > self._limits.max_body_bytes:
            return self._body_too_large(f"{length} bytes long")
        return None

    def _body_too_large(self, size: str) -> ZlmError:
        return BodyTooLarge(f"the body is {size}, the limit is {self._limits.max_body_bytes} bytes")

    @staticmethod
    def _body_is_small(request: Request) -> bool:
        if b"transfer-encoding" in request.headers:
            return False
        return int(request.headers.get(b"content-length", b"0")) <= DROPPED_BODY_BYTES

    def on_body(self, piece: bytes) -> None:
        request = self._request
        if self.finished or request.error is not None:
            return
        if not request.body:
            request.body = piece
        else:
            if isinstance(request.body, bytes):
                request.body = bytearray(request.body)
            request.body += piece
        self._continue = False
        self._held_bytes += len(piece)
        self._memory.used_bytes += len(piece)
        if len(request.body) > self._limits.max_body_bytes:
            self._refuse_rest(self._body_too_large("longer"))
        elif self._memory.used_bytes > self._limits.max_body_memory_bytes:
            message = "the server has no room for this body now: too many others are arriving"
            self._refuse_rest(Overloaded(message))

    def on_message_complete(self) -> None:
        if self.finished or self._upgrading:
            return
        self.mid_message = self._continue = False
        self._target = b""
        self.release()
        self._ready.append(self._request)
        if not self._request.keep_alive:
            self.finished = True  # what follows "Connection: close" is nobody's request
