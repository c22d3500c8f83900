"""The HTTP socket: bound before anything loads, or taken from systemd, and handed to front ends.

Owns the supervisor's copy of the socket and, for a Unix socket, its path. The socket listens from
the start, so that a second server on the port fails at once and clients wait rather than being
refused while the model loads. Knows nothing of HTTP.

Several front ends that accept from one socket share badly: whichever wakes first empties the queue
(256 connections at once went 222 to 34 over two). So each has a TCP socket of its own on the port,
among which the kernel spreads connections evenly by their addresses (SO_REUSEPORT). That flag would
let a second server of the same user in as well; therefore the port is first taken without it.
systemd's socket and a Unix socket are shared.
"""

import errno
import os
import socket
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from zlm.config import ServerOptions
from zlm.errors import ConfigError
from zlm.process.runtime import MAX_SOCKET_PATH_BYTES

BACKLOG = 4096  # connections the kernel holds until a front end accepts; it caps this itself
FIRST_SYSTEMD_FD = 3
WILDCARDS = ("0.0.0.0", "::")


class Listener:
    """A listening stream socket, or several on one address. ``url`` is where clients find it."""

    def __init__(self, *listening: socket.socket, path: Path | None = None) -> None:
        """Own *listening*; *path* is the Unix socket's file when it is ours to remove."""
        self._sockets = listening
        self._path = path
        self._inode = path.stat().st_ino if path else 0
        self.url = _url(listening[0])

    @property
    def is_public(self) -> bool:
        """Whether every address of this machine is listened on."""
        name = self._sockets[0].getsockname()
        return isinstance(name, tuple) and name[0] in WILDCARDS

    def fileno(self, index: int = 0) -> int:
        """Return the descriptor that front end number *index* inherits."""
        return self._sockets[index % len(self._sockets)].fileno()

    def close(self) -> None:
        """Close this copy and remove the Unix socket's file. May be called again."""
        if self._sockets[0].fileno() < 0:
            return
        for listening in self._sockets:
            listening.close()
        if self._path and self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()


def open_listener(
    options: ServerOptions, environment: MutableMapping[str, str] = os.environ
) -> Listener:
    """Return the socket that systemd passed, else one bound as *options* say.

    Raises ConfigError, naming the flag, when there is none to be had.
    """
    inherited = _from_systemd(environment)
    if inherited is not None:
        return inherited
    if options.uds is not None:
        return _bind_unix(Path(options.uds))
    return _bind_tcp(options.host, options.port, options.api_server_count or 1)


def _from_systemd(environment: MutableMapping[str, str]) -> Listener | None:
    """Take the socket of systemd's protocol: descriptor 3, if LISTEN_PID is this process."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = int(environment.get("LISTEN_FDS", "0"))
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environment.pop(name, None)
    if count != 1:
        raise ConfigError(f"systemd passed {count} sockets, zlm takes one: one ListenStream=")
    os.set_inheritable(FIRST_SYSTEMD_FD, False)
    inherited = socket.socket(fileno=FIRST_SYSTEMD_FD)
    if not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ConfigError("systemd passed a socket that does not listen: use Accept=no")
    return Listener(inherited)


def _bind_tcp(host: str, port: int, count: int) -> Listener:
    """Return *count* sockets on one port."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(
            bare or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address ({error})") from error
    # A name such as localhost may have an IPv6 address first on a machine that has no IPv6.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    sockets: list[socket.socket] = []
    try:
        sockets.append(_listening(family, address, shared=False))
        if count > 1:
            taken = sockets.pop()
            address = (address[0], taken.getsockname()[1], *address[2:])
            taken.close()
            for _ in range(count):
                sockets.append(_listening(family, address, shared=True))
    except OSError as error:
        for listening in sockets:
            listening.close()
        raise ConfigError(_why_not(error, host, port)) from error
    return Listener(*sockets)


def _listening(family: int, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    """Return a socket that listens on *address*, alone or with others that are *shared*."""
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        if family == socket.AF_INET6:
            # :: means every address of the machine, the IPv4 ones too.
            only_v6 = address[0] != "::"
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _why_not(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"--port {port} on {host} is taken by another program; give another --port"
        case errno.EACCES:
            return f"--port {port}: this user may not listen below 1024; give a higher --port"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is no address of this machine; 0.0.0.0 means all of them"
    return f"--host {host} --port {port}: {error.strerror}"


def _bind_unix(path: Path) -> Listener:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"--uds {path}: the path is over {MAX_SOCKET_PATH_BYTES} bytes long")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listening.bind(os.fspath(path))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"--uds {path}: {error.strerror}") from error
    except ConfigError:
        listening.close()
        raise
    return Listener(listening, path=path)


def _remove_stale(path: Path) -> None:
    """Remove the Unix socket that a server which was killed has left at *path*."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"--uds {path} is taken by another program")


def _url(listening: socket.socket) -> str:
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(name)}"
    host, port = name[:2]
    if listening.family == socket.AF_INET6:
        host = f"[{host}]"
    return f"http://{host}:{port}"
