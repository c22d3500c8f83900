"""Typed ZeroMQ sockets: every process has one inbox (PULL) and an outbox (PUSH) per peer.

An inbox is an ``ipc://`` socket in the private runtime directory, named after the process. Order is
kept between one sender and one inbox. Queues are unbounded: admission limits, not sockets, bound
what is in flight. Knows nothing of what the messages mean.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq


def address(runtime: Path, role: str, index: int = 0) -> str:
    """Return the ZeroMQ address of the inbox of process *role* number *index*."""
    return f"ipc://{runtime}/{role}-{index}.sock"


class Outbox:
    """The sending end to one peer's inbox. Owns its socket; not shared between threads.

    Sending never blocks: messages queue until the peer has bound its inbox. ``linger_ms`` is how
    long closing the context waits for what is still queued.
    """

    def __init__(self, context: zmq.Context, to: str, *, linger_ms: int = 0) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.connect(to)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(self._encoder.encode(message), copy=True)

    def close(self) -> None:
        self._socket.close()


class Inbox:
    """The receiving end of a process with a blocking loop (engine core, worker, LLM)."""

    def __init__(self, context: zmq.Context, at: str, accepts: Any) -> None:
        """Bind *at*; *accepts* is the union of message structs this inbox takes."""
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(at)
        self._decoder = msgspec.msgpack.Decoder(accepts)

    def receive(self, timeout_ms: int | None = None) -> list[Any]:
        """Return every message that waits; if none does, wait up to *timeout_ms* (None: for ever).

        Zero CPU is used while waiting. An empty list means the time ran out.
        """
        messages = self._drain()
        if messages or timeout_ms == 0:
            return messages
        if self._socket.poll(timeout_ms) == 0:
            return []
        return self._drain()

    def _drain(self) -> list[Any]:
        messages = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def close(self) -> None:
        self._socket.close()


class AsyncInbox:
    """The receiving end of an asyncio process: watches the socket's descriptor and drains it.

    ZeroMQ's descriptor is edge-triggered, so every wake-up reads until nothing is left; a bound
    on the messages taken in one turn keeps the loop responsive, and the rest is taken next turn.
    """

    MESSAGES_A_TURN = 256

    def __init__(
        self, context: zmq.Context, at: str, accepts: Any, handler: Callable[[Any], None]
    ) -> None:
        """Bind *at* and call *handler* with each message on the running event loop."""
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(at)
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._drain)
        self._loop.call_soon(self._drain)
        self._closed = False

    def _drain(self) -> None:
        if self._closed:
            return
        for _ in range(self.MESSAGES_A_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handler(self._decoder.decode(frame))
            if self._closed:
                return
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._socket.close()
