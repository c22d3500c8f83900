"""An outbox over TCP that tells how its connection fares: made, refused, or cut.

For asyncio processes. ZeroMQ connects again by itself; whether what was sent meanwhile is still of
use is for the owner to say, who closes a link that was cut and makes a new one.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from zlm.ipc.curve import Keys
from zlm.ipc.sockets import Outbox

CONNECT_MS = 2000  # until an attempt to connect, to an address that is silent, is given up
PING_MS = 1000
FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
)


class Link(Outbox):
    """The sending end of a connection to another machine. ``close`` ends the watching, too."""

    def __init__(
        self,
        context: zmq.Context,
        to: str,
        keys: Keys,
        on_change: Callable[[], None],
        *,
        silence_seconds: float,
    ) -> None:
        """Connect to *to*; *on_change* is called when one of the facts below has changed.

        A connection on which nothing comes back for *silence_seconds* counts as cut.
        """
        self.num_refused = 0  # handshakes that failed: the other end has other keys, or is no zlm
        self.was_cut = False  # after it had been made
        self._has_failed = False  # the connection that is about to end was never made
        self._on_change = on_change
        self._silence_ms = int(silence_seconds * 1000)
        self._loop = asyncio.get_running_loop()
        super().__init__(context, to, keys=keys)

    def _prepare(self) -> None:
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        events = zmq.Event.DISCONNECTED
        for event in FAILED:
            events |= event
        self._monitor = self._socket.get_monitor_socket(events)
        self._loop.add_reader(self._monitor.FD, self._watch)
        self._loop.call_soon(self._watch)  # the edge of what came before we watched

    def _watch(self) -> None:
        changed = False
        while not self._socket.closed and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event in FAILED:
                self.num_refused += 1
                self._has_failed = changed = True
            elif self._has_failed:  # it is told of as an end, too
                self._has_failed = False
            else:
                self.was_cut = changed = True
        if changed:
            self._on_change()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is still queued goes out for up to *linger_ms*. Once is enough."""
        if not self._socket.closed:
            self._loop.remove_reader(self._monitor.FD)
            self._socket.disable_monitor()
            self._socket.close(linger_ms)
