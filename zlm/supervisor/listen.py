"""The HTTP sockets: bound before anything loads, or taken from systemd, and handed to front ends.

Owns the supervisor's copy of the sockets and, for a Unix socket, its path. They listen from the
start, so that a second server on the port fails at once and clients wait rather than being refused
while the model loads. Knows nothing of HTTP.

Several front ends that accept from one socket share badly: whichever wakes first empties the queue
(256 connections at once went 222 to 34 over two). So each has a TCP socket of its own on the port,
among which the kernel spreads connections evenly by their addresses (SO_REUSEPORT). That flag would
let a second server of the same user in as well; therefore the port is first taken without it.
A Unix socket is shared.

systemd may pass any number of sockets. Those on one address (ReusePort=yes in the unit) are dealt
out among the front ends, so that each is served by one; a single one is shared by all. These
sockets outlive the server: front ends take connections from them only while the model can be
served, the others wait in the kernel for the server, or for the next one.
"""

import errno
import os
import socket
import stat
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from zlm.config import ServerOptions
from zlm.errors import ConfigError
from zlm.process.runtime import MAX_SOCKET_PATH_BYTES

BACKLOG = 4096  # connections the kernel holds until a front end accepts; it caps this itself
FIRST_SYSTEMD_FD = 3
LISTEN_FD = "ZLM_LISTEN_FD"  # environment of front ends: descriptors of their listening sockets
LISTEN_WAIT = "ZLM_LISTEN_WAIT"  # there as well: accept only while the model can be served
WILDCARDS = ("0.0.0.0", "::")


class Listener:
    """Listening stream sockets that *count* front ends share. ``url`` is where clients find them.

    ``outlives``: the sockets are systemd's, and clients may wait in them while nobody accepts.
    """

    def __init__(
        self,
        *listening: socket.socket,
        count: int = 1,
        path: Path | None = None,
        outlives: bool = False,
    ) -> None:
        """Own *listening*; *path* is the Unix socket's file when it is ours to remove."""
        self._sockets = listening
        self._shares = _deal(listening, count)
        self._path = path
        self._inode = path.stat().st_ino if path else 0
        self.outlives = outlives
        self._tls: dict[str, str] = {}
        self.url = " and ".join(dict.fromkeys(map(_url, listening)))

    @property
    def is_public(self) -> bool:
        """Whether every address of this machine is listened on."""
        names = [listening.getsockname() for listening in self._sockets]
        return any(isinstance(name, tuple) and name[0] in WILDCARDS for name in names)

    def filenos(self, index: int) -> tuple[int, ...]:
        """Return the descriptors that front end number *index* inherits."""
        return tuple(listening.fileno() for listening in self._shares[index])

    def environment(self, index: int) -> dict[str, str]:
        """Return what front end number *index* finds its sockets by in its environment."""
        found = {LISTEN_FD: ",".join(map(str, self.filenos(index)))}
        return found | self._tls | ({LISTEN_WAIT: "1"} if self.outlives else {})

    def secure(self, options: ServerOptions) -> None:
        """Have front ends speak TLS; raises ConfigError if they could not, naming the flag."""
        from zlm.frontend import tls  # loading OpenSSL takes 10 ms that few starts need

        files = tls.tls_files(options)
        if files is not None:
            tls.server_context(files)
            self._tls = tls.environment(options)
            self.url = self.url.replace("http://", "https://")

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
    listener = _open(options, environment)
    if options.ssl_certfile is not None:
        try:
            listener.secure(options)
        except ConfigError:
            listener.close()
            raise
    return listener


def _open(options: ServerOptions, environment: MutableMapping[str, str]) -> Listener:
    count = options.api_server_count or 1
    inherited = _from_systemd(environment)
    if inherited:
        return Listener(*inherited, count=count, outlives=True)
    if options.uds is not None:
        return _bind_unix(Path(options.uds), count)
    return _bind_tcp(options.host, options.port, count)


def _from_systemd(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Take the sockets of systemd's protocol, from descriptor 3 on, if LISTEN_PID is this process.

    None are passed when the service was started without its socket unit.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return []
    passed = environment.get("LISTEN_FDS", "0")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environment.pop(name, None)
    if not (passed.isascii() and passed.isdigit()):
        raise ConfigError(f"LISTEN_FDS is {passed[:20]!r}, which is no number of sockets")
    return [_inherited(FIRST_SYSTEMD_FD + offset) for offset in range(int(passed))]


def _inherited(fd: int) -> socket.socket:
    """Return descriptor *fd*, which systemd passed, as a socket that this process alone keeps."""
    unfit = f"descriptor {fd} that systemd passed is no listening stream socket"
    try:
        os.set_inheritable(fd, False)
        inherited = socket.socket(fileno=fd)
        listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"{unfit} ({error.strerror})") from error
    if not listens or inherited.type != socket.SOCK_STREAM:
        raise ConfigError(f"{unfit}: use ListenStream= with Accept=no")
    return inherited


def _deal(listening: Sequence[socket.socket], count: int) -> list[list[socket.socket]]:
    """Return which of the sockets each of *count* front ends accepts from.

    Each front end is on every address, and each socket has one at least: what the kernel puts into
    a socket that nobody accepts from would wait for ever.
    """
    addresses: dict[object, list[socket.socket]] = {}
    for each in listening:
        addresses.setdefault((each.family, each.getsockname()), []).append(each)
    shares: list[list[socket.socket]] = [[] for _ in range(count)]
    for own in addresses.values():
        for turn in range(max(len(own), count)):
            shares[turn % count].append(own[turn % len(own)])
    return shares


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
    return Listener(*sockets, count=count)


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


def _bind_unix(path: Path, count: int) -> Listener:
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
    return Listener(listening, count=count, path=path)


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
