"""Asking an OpenAI-compatible server from a terminal: streamed answers, as an iterator of pieces.

The server is somebody's, by its URL, or one of our own, by its Unix socket.
"""

import json
import socket
import ssl
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from zlm.errors import ConfigError, Internal, ZlmError

CONNECT_SECONDS = 10.0  # for a connection, and for answers that take no work
STRANGE = "it does not look like an OpenAI-compatible server"
KEY_HINT = "give the key with --api-key or in $ZLM_API_KEY"
DATA = b"data: "


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it came."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


class Asker:
    """A way to one server. ``connect`` makes a connection for each question."""

    def __init__(
        self,
        connect: Callable[[], HTTPConnection],
        prefix: str = "",
        api_key: str = "",
        name: str = "the server",
    ) -> None:
        """*name* is what errors call the server."""
        self._connect = connect
        self._name = name
        self._prefix = prefix
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = authorization(api_key)

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of the answer; OSError if nobody answers."""
        connection = self._connect()
        try:
            connection.request("GET", self._prefix + path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except HTTPException as error:
            raise OSError(f"no HTTP: {error}") from error
        finally:
            connection.close()

    def models(self) -> list[str]:
        """Return the names that the server's models have. Raises ZlmError if it does not say."""
        try:
            status, body = self.get("/v1/models")
        except TimeoutError as error:
            raise Internal(f"{self._name} has not answered in time") from error
        except OSError as error:
            raise Internal(f"{self._name} cannot be reached: {error}") from error
        if status != 200:
            raise _refusal(status, body, self._name)
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Internal(f"{self._name} does not tell its models: {STRANGE}") from error

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """Yield the answer to *body* as it comes; closing the iterator stops the server's work.

        Raises ZlmError, in the server's words, if it refuses or breaks off.
        """
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        connection = self._connect()
        try:
            content = json.dumps(asked).encode()
            connection.connect()
            connection.sock.settimeout(None)  # an answer may take its time
            connection.request("POST", self._prefix + path, content, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refusal(answer.status, answer.read(), self._name)
            yield from self._pieces(answer)
        except (OSError, HTTPException) as error:
            raise Internal(f"the connection to {self._name} broke: {error}") from error
        finally:
            connection.close()

    def _pieces(self, answer: HTTPResponse) -> Iterator[Piece]:
        is_done = False
        for line in answer:
            if not line.startswith(DATA):
                continue
            data = line.removeprefix(DATA).strip()
            if data == b"[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise _refusal(500, data, self._name)
            yield _piece(event)
        if not is_done:
            raise Internal(f"{self._name} broke the answer off")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is that runs."""

    is_tls: bool
    host: str
    port: int
    prefix: str  # of its paths

    @property
    def url(self) -> str:
        """Where it is, without what may be secret of the URL that was given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}:{self.port}{self.prefix}"


def address(url: str, flag: str = "--url ") -> Address:
    """Return what *url* says, with or without ``/v1`` at its end; raise ConfigError if nothing."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{flag}{url}: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{flag}{url}: must be like http://127.0.0.1:8000")
    is_tls = parts.scheme == "https"
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"{flag}{url}: no host can have the name {host}") from error
    prefix = quote(parts.path, safe="/%:@!$&'()*+,;=~").rstrip("/").removesuffix("/v1")
    return Address(is_tls, host, port or (443 if is_tls else 80), prefix)


def authorization(api_key: str) -> str:
    """Return the value of the header for *api_key*; raises ConfigError if none can carry it."""
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key: a key has only visible ASCII characters")
    return f"Bearer {api_key}"


def by_url(url: str, api_key: str, timeout_seconds: float | None = CONNECT_SECONDS) -> Asker:
    """Return the way to the server at *url*; raises ConfigError if it is no URL of one.

    timeout_seconds: longest wait for a part of an answer, but not of a stream; None: any.
    """
    where = address(url)

    def connect() -> HTTPConnection:
        if where.is_tls:
            context = ssl.create_default_context()
            return HTTPSConnection(where.host, where.port, timeout=timeout_seconds, context=context)
        return HTTPConnection(where.host, where.port, timeout=timeout_seconds)

    return Asker(connect, where.prefix, api_key, f"the server at {where.url}")


def by_socket(path: Path) -> Asker:
    """Return the way to the server that listens on the Unix socket *path*."""
    return Asker(lambda: _UnixConnection(path))


def _piece(event: dict[str, Any]) -> Piece:
    if not event["choices"]:
        return Piece(usage=event.get("usage"))
    choice = event["choices"][0]
    delta = choice.get("delta", {})
    text = choice.get("text") or delta.get("content") or ""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return Piece(text, reasoning, choice.get("finish_reason"))


def _refusal(status: int, body: bytes, name: str) -> ZlmError:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = body[:200].decode(errors="replace").strip()
        shown = "" if not said or said.startswith("<") else f" ({said})"  # no pages
        message = f"{name} answers with status {status}{shown}: {STRANGE}"
    if status == 401:
        message = f"{message}; {KEY_HINT}"
    return ZlmError(message, status=status)
