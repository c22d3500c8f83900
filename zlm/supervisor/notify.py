"""systemd's notification protocol: READY=1, STATUS= and STOPPING=1 as datagrams to a Unix socket.

Owns the socket. Does nothing when $NOTIFY_SOCKET is not set. A message that cannot be sent is
logged once and changes nothing else: the service manager's troubles are not the clients'.
"""

import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """Tells the service manager how far this process is."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        if path:
            # A leading @ stands for the zero byte of Linux's abstract namespace.
            self._to = "\0" + path[1:] if path.startswith("@") else path
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        """Say that the service is up."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> None:
        """Say what goes on, for ``systemctl status``."""
        self._send(f"STATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        """Say that the service is on its way down."""
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def close(self) -> None:
        """Close the socket; later messages are dropped. May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message.encode(), self._to)
        except OSError as error:
            logger.warning("cannot notify the service manager: %s", error)
            self.close()


def _line(text: str) -> str:
    return text.replace("\n", " ")
