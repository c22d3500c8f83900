"""How ``zlm run`` asks a server: connections that carry one request after another.

There are as many as requests at once. A server that is busy or starting again is asked until it
answers, so a request has an answer or the run has a fault. The server is one of the run's own, on
a Unix socket, or one that runs somewhere; the latter may be away for a while.
"""

import asyncio
import socket
import ssl
import sys
import time
from typing import Any, Protocol

import msgspec

from zlm.cli.ask import CONNECT_SECONDS, KEY_HINT, STRANGE, Address, authorization
from zlm.cli.own_server import OwnServer
from zlm.errors import Internal, ZlmError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BUSY = (429, 503)
FAULT = 500  # and above; what is below, of /health/ready, is of a server that may lack the route
AWAY_SECONDS = 60.0  # how long a server that is not ours may be away
LOOK_SECONDS = 0.05  # before a server that cannot be reached is tried again
RETRY_SECONDS = 5.0  # longest wait before a request that was turned away is sent again
REQUEST_ID = b"x-request-id"


class Server(Protocol):
    """Whom a run asks."""

    prefix: str  # of paths
    headers: str  # of every request
    name: str  # in messages
    patience: float | None  # seconds for an answer that takes no work

    def check(self) -> None:
        """Raise Internal if it will not answer any more."""

    async def connect(self) -> Streams:
        """Return a new connection; raises OSError if there can be none."""


class Own:
    """A server of the run's own."""

    prefix = headers = ""
    name = "the server"
    patience: float | None = None

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
        self.headers = f"Authorization: {authorization(api_key)}\r\n" if api_key else ""
        self.name = f"{address.host}:{address.port}"
        self.patience: float | None = CONNECT_SECONDS
        self._address = address
        self._context = ssl.create_default_context() if address.is_tls else None
        self._away_since: float | None = None
        self._was_there = False

    def check(self) -> None:
        since = self._away_since
        if since is not None and time.monotonic() - since > AWAY_SECONDS:
            raise Internal(f"no server has answered at {self.name} for {AWAY_SECONDS:g} s")

    async def connect(self) -> Streams:
        where = self._address
        try:
            made = await asyncio.open_connection(where.host, where.port, ssl=self._context)
        except OSError as error:
            if not self._was_there and isinstance(error, socket.gaierror | ssl.SSLError):
                raise Internal(f"{self.name} cannot be reached: {error}") from error
            self._away_since = self._away_since or time.monotonic()
            raise
        self._away_since, self._was_there = None, True
        return made


async def wait_ready(server: Server) -> None:
    """Wait until *server* serves; raises ZlmError if it ends before, or will not."""
    connection = Connection(server)
    heard, is_told = time.monotonic(), server.patience is None
    while True:
        server.check()
        try:
            async with asyncio.timeout(server.patience):
                status, *_ = await connection.request("GET", "/health/ready", b"")
            if status < FAULT and status not in BUSY:
                break
            heard = time.monotonic()
        except TimeoutError as error:
            raise Internal(f"{server.name} has not answered for {server.patience:g} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            if server.patience is not None and time.monotonic() - heard > AWAY_SECONDS:
                raise Internal(f"{server.name} does not answer: {error}") from error
            if not is_told:
                line = f"zlm run: waiting for {server.name}, up to {AWAY_SECONDS:g} s"
                print(line, file=sys.stderr)
            is_told = True
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
                raise ZlmError(f"{self._server.name} wants another key (status 401); {KEY_HINT}")
            if status not in BUSY:
                name = headers.get(REQUEST_ID, b"").decode("latin-1")
                return status, self._decoded(status, content), name
            seconds = float(headers.get(b"retry-after", b"1"))
            await asyncio.sleep(min(seconds, RETRY_SECONDS))

    def _decoded(self, status: int, content: bytes) -> Any:
        try:
            return msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = f"{self._server.name} answers with status {status} and no JSON: {STRANGE}"
            raise ZlmError(problem) from error

    async def request(
        self, method: str, path: str, body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Send one request; return status, headers by lower-case name, and body.

        Raises OSError or IncompleteReadError if the connection breaks; the next call makes another.
        Raises ZlmError if what comes is no HTTP.
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
            status = int(start.split()[1])
            content = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            self.close()
            raise ZlmError(f"{self._server.name} does not speak HTTP: {STRANGE}") from error
        except BaseException:
            self.close()
            raise
        if headers.get(b"connection", b"").lower() == b"close":
            self.close()
        return status, headers, content

    def close(self) -> None:
        """Close the connection; it may be used again."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
