"""The sockets that a front end inherits and takes connections from.

Owns this process's copy of them. A server's own sockets are accepted from at once, so that clients
are told that the model loads. systemd's sockets outlive the server, so clients may wait in them:
they are accepted from only while the model can be served, and what they hold when this server
drains is left to the next one. Knows nothing of HTTP.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from zlm.frontend.tls import HANDSHAKE_SECONDS, SHUTDOWN_SECONDS, Certificates

LISTEN_FD = "ZLM_LISTEN_FD"  # environment: descriptors of the sockets, separated by commas
LISTEN_WAIT = "ZLM_LISTEN_WAIT"  # environment: set if clients may wait in the sockets
BACKLOG = 4096  # connections the kernel holds until one is accepted


class Listening:
    """Accepts connections from ``open`` to ``close``. ``waits``: not before the model is ready."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: Callable[[], asyncio.Protocol],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Take the sockets that *environment* names; each connection gets a new *protocol*."""
        self._loop = loop
        self._protocol = protocol
        self._sockets = [
            socket.socket(fileno=int(fd)) for fd in environment.get(LISTEN_FD, "").split(",")
        ]
        self._servers: list[asyncio.AbstractServer] = []
        self.certificates = Certificates.from_environment(environment)
        self._closed = False
        self.waits = LISTEN_WAIT in environment

    async def open(self) -> None:
        """Accept connections from now on, unless ``close`` came first."""
        for inherited in self._sockets:
            if self._closed:
                return
            inherited.setblocking(False)
            create = self._loop.create_server
            if inherited.family == socket.AF_UNIX:
                create = self._loop.create_unix_server  # type: ignore[assignment]
            server = await create(
                self._protocol, sock=inherited, backlog=BACKLOG, **self._tls_keywords()
            )
            self._servers.append(server)
            if self._closed:
                server.close()

    def _tls_keywords(self) -> dict[str, Any]:
        if self.certificates is None:
            return {}
        return {
            "ssl": self.certificates.context,
            "ssl_handshake_timeout": HANDSHAKE_SECONDS,
            "ssl_shutdown_timeout": SHUTDOWN_SECONDS,
        }

    def close(self) -> None:
        """Accept no more; open connections are not touched. May be called again."""
        self._closed = True
        for server in self._servers:
            server.close()
