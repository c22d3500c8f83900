"""Typed ZeroMQ sockets: every process has one inbox (PULL) and an outbox (PUSH) per peer.

An inbox is an ``ipc://`` socket in the private runtime directory, named after the process. Between
machines it listens on TCP as well, or instead, with keys that both ends must have (``curve``).
Order is kept between one sender and one inbox. Queues are unbounded: admission limits, not sockets,
bound what is in flight. Knows nothing of what the messages mean.

A frame that does not decode can only come from a fault of ours (nobody else may enter the runtime
directory), and with it an answer that somebody waits for may be lost. So it is never dropped: the
blocking inbox raises ``MessageError``; the asyncio inbox hands it to ``on_error``, which in a child
process ends the process with that reason. Neither loses the messages that came before or after it.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from zlm.errors import Internal
from zlm.ipc.curve import Keys

RECONNECT_MS = 10  # first pause before an outbox tries again to reach an inbox not yet bound
RECONNECT_MOST_MS = 100


class MessageError(Internal):
    """A frame that is none of the messages its inbox takes."""


def address(runtime: Path, role: str, index: int = 0, incarnation: int = 0) -> str:
    """Return the ZeroMQ address of the inbox of process *role* number *index*.

    Each *incarnation* of a process that was replaced has an inbox of its own.
    """
    successor = f".{incarnation}" if incarnation else ""
    return f"ipc://{runtime}/{role}-{index}{successor}.sock"


class Outbox:
    """The sending end to one peer's inbox. Owns its socket; not shared between threads.

    Sending never blocks: messages queue until the peer has bound its inbox. ``linger_ms`` is how
    long closing the context waits for what is still queued.
    """

    def __init__(
        self, context: zmq.Context, to: str, *, linger_ms: int = 0, keys: Keys | None = None
    ) -> None:
        """Connect to the address *to*, which over TCP wants *keys*."""
        self._socket = context.socket(zmq.PUSH)
        if keys is not None:
            keys.connects(self._socket)
        self._prepare()
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
        self._socket.connect(to)
        self._encoder = msgspec.msgpack.Encoder()

    def _prepare(self) -> None:
        """Make the socket ready to connect."""

    def send(self, message: msgspec.Struct) -> None:
        """Queue *message* for the peer."""
        self._socket.send(self._encoder.encode(message), copy=True)

    def close(self) -> None:
        """Close the socket; what is still queued is sent for up to ``linger_ms``."""
        self._socket.close()


class Inbox:
    """The receiving end of a process with a blocking loop (engine core, worker, LLM)."""

    def __init__(self, context: zmq.Context, at: str, accepts: Any) -> None:
        """Bind *at*; *accepts* is the union of message structs this inbox takes."""
        self._at = at
        self._socket = _bound(context, at)
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._error: MessageError | None = None  # raised once what came before it is delivered

    def listen(self, at: str, keys: Keys) -> str:
        """Take messages at the TCP address *at*, too; return it, with the port if that is ``*``."""
        return _listen(self._socket, at, keys)

    @property
    def descriptor(self) -> int:
        """What becomes readable (edge-triggered) when messages have come, for an event loop."""
        return int(self._socket.FD)

    def receive(self, timeout_ms: int | None = None) -> list[Any]:
        """Return every message that waits; if none does, wait up to *timeout_ms* (None: for ever).

        Zero CPU is used while waiting. An empty list means the time ran out. Raises MessageError
        at a frame that does not decode, once the messages before it have been returned.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if timeout_ms == 0:
            if not _has_more(self._socket):
                return []
        elif timeout_ms is not None and self._socket.poll(timeout_ms) == 0:
            return []
        messages: list[Any] = []
        while True:
            frame = self._socket.recv()  # waits for the first; the others are there
            try:
                messages.append(self._decoder.decode(frame))
            except msgspec.MsgspecError as fault:
                error = _message_error(self._at, frame, fault)
                if not messages:
                    raise error from None
                self._error = error
                return messages
            if not _has_more(self._socket):
                return messages

    def close(self) -> None:
        """Close the socket and drop what waits in it."""
        self._socket.close()


class AsyncInbox:
    """The receiving end of an asyncio process: watches the socket's descriptor and drains it.

    ZeroMQ's descriptor is edge-triggered, so every wake-up reads until nothing is left; a bound
    on the messages taken in one turn keeps the loop responsive, and the rest is taken next turn.
    """

    MESSAGES_A_TURN = 256

    def __init__(
        self,
        context: zmq.Context,
        at: str,
        accepts: Any,
        handler: Callable[[Any], None],
        *,
        on_error: Callable[[Exception], None] | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Bind *at* and call *handler* with each message on the running event loop.

        At a TCP address who sends must have *keys*; its port may be ``*``, see ``address``.
        *on_error* gets what *handler* raises, and a MessageError for a frame that does not decode;
        without it they go to the loop's exception handler. The messages after it follow.
        """
        self._socket = _bound(context, at, keys)
        self.address = self._at = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error or self._tell_loop
        self._closed = False
        self._descriptor = self._socket.FD
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)  # the edge of what came before we watched

    def _drain(self) -> None:
        for _ in range(self.MESSAGES_A_TURN):
            if self._closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except msgspec.MsgspecError as error:
                self._on_error(_message_error(self._at, frame, error))
                continue
            try:
                self._handler(message)
            except Exception as error:
                self._on_error(error)
            if not self._closed and not _has_more(self._socket):
                return
        self._loop.call_soon(self._drain)

    def monitor(self, events: zmq.Event) -> zmq.Socket:
        """Return a socket that tells of *events* at this inbox, and is closed with it."""
        return self._socket.get_monitor_socket(events)

    def _tell_loop(self, error: Exception) -> None:
        message = f"handling a message at {self._at} failed"
        self._loop.call_exception_handler({"message": message, "exception": error})

    def close(self) -> None:
        """Stop watching, close the socket and drop what waits in it."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.disable_monitor()
            self._socket.close()


def _has_more(socket: zmq.Socket) -> bool:
    """Whether a message waits: asking costs half of what finding none by ``recv`` does."""
    events: Any = socket.getsockopt(zmq.EVENTS)
    return bool(events & zmq.POLLIN)


def _bound(context: zmq.Context, at: str, keys: Keys | None = None) -> zmq.Socket:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        _listen(socket, at, keys)
    else:
        socket.bind(at)
    return socket


def _listen(socket: zmq.Socket, at: str, keys: Keys) -> str:
    keys.listens(socket)  # for what is bound from here on
    socket.bind(at)
    return str(socket.get_string(zmq.LAST_ENDPOINT))


def _message_error(at: str, frame: bytes, error: Exception) -> MessageError:
    return MessageError(f"{at} got {len(frame)} bytes that are none of its messages: {error}")
