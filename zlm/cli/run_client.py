"""How ``zlm run`` asks its server: connections that carry one request after another.

There are as many as requests at once. A server that is busy or starting again is asked until it
answers, so a request has an answer or the run has a fault.
"""

import asyncio
from typing import Any

import msgspec

from zlm.cli.own_server import OwnServer

LOOK_SECONDS = 0.05  # before a server that cannot be reached is tried again
RETRY_SECONDS = 5.0  # longest wait before a request that was turned away is sent again
REQUEST_ID = b"x-request-id"


async def wait_ready(server: OwnServer) -> None:
    """Wait until *server* serves; raises Internal if it ends before."""
    connection = Connection(server)
    status = 0
    while status != 200:
        server.check()
        try:
            status, *_ = await connection.request("GET", "/health/ready", b"")
        except (OSError, asyncio.IncompleteReadError):
            status = 0
        if status != 200:
            await asyncio.sleep(LOOK_SECONDS)
    connection.close()


class Connection:
    """One connection, made when it is needed. One request at a time."""

    def __init__(self, server: OwnServer) -> None:
        self._server = server
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

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
            if status != 503:
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
            self._streams = await asyncio.open_unix_connection(str(self._server.socket))
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nHost: zlm\r\nContent-Type: application/json\r\n"
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
