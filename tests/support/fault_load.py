"""Requests that are open while something is broken, and whether each got exactly one answer."""

import json
import threading
from http.client import HTTPException
from typing import Any

from running_server import Server

TOKENS = 450  # of each answer: more than come before the fault
PATIENCE_SECONDS = 60.0


class OpenStream:
    """A streamed completion, read by a thread to its end."""

    def __init__(self, server: Server, prompt: list[int]) -> None:
        self.data = b""
        self.begun = threading.Event()
        self._raw = server.open_stream(prompt, max_tokens=TOKENS, ignore_eos=True)
        self._raw.settimeout(PATIENCE_SECONDS)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while chunk := self._raw.recv(65536):
                self.data += chunk
                if b"data: " in self.data:
                    self.begun.set()
        except ConnectionError:
            pass
        except TimeoutError:
            self.data += b"(no end came)"
        self._raw.close()

    def outcome(self) -> str:
        """Return how it ended: done, error or cut; fails if it had two ends, or none."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive() and b"(no end came)" not in self.data
        ends = self.data.count(b"data: [DONE]") + self.data.count(b'data: {"error":')
        if ends == 0:
            return "cut"
        assert ends == 1, self.data[-500:]
        return "done" if b"data: [DONE]" in self.data else "error"


class OpenWhole:
    """A completion that is answered whole, waited for by a thread."""

    def __init__(self, server: Server, prompt: list[int]) -> None:
        self._server, self._prompt = server, prompt
        self.status = -1
        self.body: Any = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            answer = self._server.complete(self._prompt, max_tokens=TOKENS, ignore_eos=True)
            self.status, self.body = answer.status, json.loads(answer.body)
        except (OSError, HTTPException):
            self.status = 0

    def outcome(self) -> str:
        """Return how it ended: done, error or cut."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive() and self.status >= 0, "no answer came"
        if self.status == 0:
            return "cut"
        assert self.status == 200 or self.body["error"]["message"]
        return "done" if self.status == 200 else "error"


def start_load(server: Server, streams: int = 3, wholes: int = 2) -> list[Any]:
    """Open requests and return them once every stream has begun."""
    opened = [OpenStream(server, [5 + n, 6, 7]) for n in range(streams)]
    waiting = [OpenWhole(server, [9 + n, 6, 7]) for n in range(wholes)]
    for stream in opened:
        assert stream.begun.wait(PATIENCE_SECONDS), stream.data
    return [*opened, *waiting]
