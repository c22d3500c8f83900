"""systemd's notification protocol: how far this process is, as datagrams to a Unix socket.

    loading   STATUS=  EXTEND_TIMEOUT_USEC=   news of the start, each with more time for it
    ready     READY=1  MAINPID=               watchdog() says WATCHDOG=1 from here on
    stopping  STOPPING=1  EXTEND_TIMEOUT_USEC=  as long as open requests may take to finish

Owns the socket. Does nothing when $NOTIFY_SOCKET is not set. What could not be sent goes out with
the next message, so that a service manager which is busy or restarts itself still learns of READY;
the failure is logged once. The manager's troubles are not the clients'.

A start may take long, with a download or kernels to compile, and yet a hung one must not last for
ever. Whether it gets on is for ``hangs`` to judge (--startup-timeout); while that finds nobody
stuck, each status and each ``watchdog`` before ``ready`` gives the start EXTEND_SECONDS from then.
So the unit's TimeoutStartSec is for a supervisor that hangs itself.
"""

import logging
import os
import socket
from collections.abc import Mapping

EXTEND_SECONDS = 120.0  # what one sign of progress gives a start

logger = logging.getLogger(__name__)


class Notifier:
    """Tells the service manager how far this process is.

    ``watchdog_seconds``: how long the manager waits between two calls of ``watchdog`` before it
    kills the service, so call it at least twice as often; None if it does not watch.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.watchdog_seconds = _watchdog_seconds(environment)
        self._is_loading = True
        self._unsent: dict[str, str] = {}  # assignments of messages that could not be sent
        self._has_complained = False
        path = environment.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        if path:
            # A leading @ stands for the zero byte of Linux's abstract namespace.
            self._to = "\0" + path[1:] if path.startswith("@") else path
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        """Say that the service is up."""
        self._is_loading = False
        self._unsent.pop("EXTEND_TIMEOUT_USEC", None)
        self._send({"READY": "1", "MAINPID": str(os.getpid()), "STATUS": status})

    def status(self, status: str) -> None:
        """Say what goes on, for ``systemctl status``; before ``ready`` it counts as progress."""
        self._send({"STATUS": status} | self._more_time())

    def watchdog(self) -> None:
        """Say that there is progress, or nothing to do."""
        if self._is_loading:
            self._send(self._more_time())
        elif self.watchdog_seconds is not None:
            self._send({"WATCHDOG": "1"})

    def stopping(self, status: str, seconds: float = 0.0) -> None:
        """Say that the service is on its way down, which may take *seconds* from now."""
        self._is_loading = False
        message = {"STOPPING": "1", "STATUS": status}
        if seconds > 0:
            message["EXTEND_TIMEOUT_USEC"] = _microseconds(seconds)
        self._send(message)

    def close(self) -> None:
        """Close the socket; later messages are dropped. May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _more_time(self) -> dict[str, str]:
        return {"EXTEND_TIMEOUT_USEC": _microseconds(EXTEND_SECONDS)} if self._is_loading else {}

    def _send(self, message: Mapping[str, str]) -> None:
        if self._socket is None:
            return
        self._unsent.update({name: _line(value) for name, value in message.items()})
        text = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(text.encode(), self._to)
        except OSError as error:
            if not self._has_complained:
                logger.warning("cannot notify the service manager: %s", error)
            self._has_complained = True
        else:
            self._has_complained = False
            self._unsent.clear()


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Read systemd's watchdog protocol; a WATCHDOG_PID that is not this process is not for it."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    if not microseconds.isascii() or not microseconds.isdigit() or int(microseconds) == 0:
        return None
    return int(microseconds) / 1e6


def _microseconds(seconds: float) -> str:
    return str(round(seconds * 1e6))


def _line(text: str) -> str:
    return " ".join(text.splitlines())
