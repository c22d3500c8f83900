"""How ``zlm run`` asks a server: connections that carry one request after another.

There are as many as requests at once. A server that is busy or starting again is asked until it
answers, so a request has an answer or the run has a fault. The server is one of the run's own, on
a Unix socket, or one that runs somewhere; the latter may be away for a while.
"""

import asyncio
import ssl
import time
from typing import Any, Protocol

import msgspec

from zlm.cli.ask import Address
from zlm.cli.own_server import OwnServer
from zlm.errors import Internal, ZlmError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
READY = (200, 404)  # of /health/ready; not every server that is not ours has it
BUSY = (429, 503)
AWAY_SECONDS = 60.0  # how long a server that is not ours may be away
LOOK_SECONDS = 0.05  # before a server that cannot be reached is tried again
RETRY_SECONDS = 5.0  # longest wait before a request that was turned away is sent again
REQUEST_ID = b"x-request-id"


class Server(Protocol):
    """Whom a run asks."""

    prefix: str  # of paths
    headers: str  # of every request

    def check(self) -> None:
        """Raise Internal if it will not answer any more."""

    async def connect(self) -> Streams:
        """Return a new connection; raises OSError if there can be none."""


class Own:
    """A server of the run's own."""

    prefix = headers = ""

    def __init__(self, server: OwnServer) -> None:
        self._server = server

    def check(self) -> None:
        self._server.check()

    async def connect(self) -> Streams:
        return await asyncio.open_unix_connection(str(self._server.socket))


class Running:
    """A server that runs at *address*."""

    def __init__(self, address: Address, api_key: str) -> None:
        self.prefix = address.prefix
        self.headers = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._address = address
        self._context = ssl.create_default_context() if address.is_tls else None
        self._away_since: float | None = None

    def check(self) -> None:
        since = self._away_since
        if since is not None and time.monotonic() - since > AWAY_SECONDS:
            where = f"{self._address.host}:{self._address.port}"
            raise Internal(f"no server has answered at {where} for {AWAY_SECONDS:g} s")

    async def connect(self) -> Streams:
        where = self._address
        try:
            made = await asyncio.open_connection(where.host, where.port, ssl=self._context)
        except OSError:
            self._away_since = self._away_since or time.monotonic()
            raise
        self._away_since = None
        return made


async def wait_ready(server: Server) -> None:
    """Wait until *server* serves; raises Internal if it ends before."""
    connection = Connection(server)
    status = 0
    while status not in READY:
        server.check()
        try:
            status, *_ = await connection.request("GET", "/health/ready", b"")
        except (OSError, asyncio.IncompleteReadError):
            status = 0
        if status not in READY:
            await asyncio.sleep(LOOK_SECONDS)
    connection.close()


class Connection:
    """One connection, made when it is needed. One request at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._streams: Streams | None = None

    async def ask(self, path: str, body: bytes) -> tuple[int, Any, str]:
        """Return status, JSON body and request id of the answer to a POST of *body*.

        A server that is busy or starting again is asked until it answers; raises Internal if it
        has ended.
        """
        while True:
            self._server.check()
            try:
                status, headers, content = await self.request("POST", path, body)
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(LOOK_SECONDS)
                continue
            if status == 401:  # no request can be answered, so none is said to be
                raise ZlmError(msgspec.json.decode(content)["error"]["message"])
            if status not in BUSY:
                name = headers.get(REQUEST_ID, b"").decode("latin-1")
                return status, msgspec.json.decode(content), name
            seconds = float(headers.get(b"retry-after", b"1"))
            await asyncio.sleep(min(seconds, RETRY_SECONDS))

    async def request(
        self, method: str, path: str, body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Send one request; return status, headers by lower-case name, and body.

        Raises OSError or IncompleteReadError if the connection breaks; the next call makes another.
        """
        if self._streams is None:
            self._streams = await self._server.connect()
        reader, writer = self._streams
        head = f"{method} {self._server.prefix}{path} HTTP/1.1\r\nHost: zlm\r\n"
        head += f"Content-Type: application/json\r\n{self._server.headers}"
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            start, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
            pairs = (line.partition(b":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            content = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        except BaseException:
            self.close()
            raise
        if headers.get(b"connection", b"").lower() == b"close":
            self.close()
        return int(start.split()[1]), headers, content

    def close(self) -> None:
        """Close the connection; it may be used again."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
