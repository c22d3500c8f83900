"""The output of ``zlm run``: one JSON line an answer, and the record of what is done.

A line is written whole, in one call, and only when its answer is there; so a run that is killed, at
whatever moment, leaves the answers that it had, and perhaps the beginning of one more line, which
the next run cuts off. What has a line is not asked again; the line has a digest of what was asked,
so that a request that changed under its id is noticed. Owns the file, under a lock: two runs cannot
write one.
"""

import fcntl
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from zlm.cli.run_input import DIGEST_CHARACTERS, Entry
from zlm.errors import ConfigError, clip

BEGINNING = b'{"id":"'  # of every line
BATCH_ID = "batch_req_"
DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}")
REQUEST_KEYS = {"prompt", "messages", "body"}  # which no answer has
SYNC_SECONDS = 1.0  # at most so much is lost when the machine itself fails


class Journal:
    """The answers of one input file. ``done`` are the ids that have one, with what was asked."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        """Open *path*, and make it if there is none; *anew*: forget what it holds.

        Raises ConfigError if it cannot be written, another run has it, or it holds other lines.
        """
        self.done: dict[str, str] = {}  # to the entry's digest; empty: an older run's, not known
        self.num_failed = 0  # of all answers, those that are errors
        self.first_failure = ""  # its words
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._synced = time.monotonic()
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ConfigError(f"cannot keep answers in {path}: it is no regular file")
            self._lock()
            if anew:
                os.ftruncate(self._fd, 0)
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{self._path} is being written by another run") from error

    def _read(self) -> None:
        """Take in what is done, and cut off an answer that was not finished."""
        whole = 0  # bytes
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n") and _is_begun(line):
                    break
                self._take(line, number)
                whole += len(line)
                if not line.endswith(b"\n"):
                    os.write(self._fd, b"\n")
                    return
        os.ftruncate(self._fd, whole)

    def _take(self, line: bytes, number: int) -> None:
        try:
            values = msgspec.json.decode(line)
            name = values.get("custom_id", values.get("id"))
            digest = values.get("request", "")
            if "custom_id" in values:
                digest = str(values.get("id", "")).removeprefix(BATCH_ID)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            name = digest = None
        if not isinstance(name, str):
            raise ConfigError(f"{self._path} holds no answers: see line {number}; give --anew")
        if REQUEST_KEYS & values.keys():
            problem = f"{self._path} holds requests: see line {number}"
            raise ConfigError(f"{problem}; give another output file")
        self.done[name] = digest if isinstance(digest, str) and DIGEST.fullmatch(digest) else ""
        self._count(values)

    def _count(self, values: dict[str, Any]) -> None:
        if _is_failure(values):
            self.num_failed += 1
            self.first_failure = self.first_failure or clip(_reason(values))

    def check(self, wanted: Mapping[str, str]) -> None:
        """Raise ConfigError if there is an answer to what is not *wanted*: ids and digests."""
        what = "give another output file, or --anew"
        for name in self.done:
            if name not in wanted:
                problem = f"holds an answer to {clip(name)}, which the input does not have"
                raise ConfigError(f"{self._path} {problem}: {what}")
        changed = [name for name, digest in self.done.items() if digest not in ("", wanted[name])]
        if changed:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ConfigError(
                f"{self._path} holds answers to requests that have changed in the input since: "
                f"{clip(changed[0])}{others}: {what}"
            )

    def write(self, entry: Entry, status: int, body: Any, request_id: str) -> None:
        """Add the answer to *entry*: status and body of the response; 0 and a text if none came."""
        answer = _batch_answer if entry.is_batch else _answer
        values = answer(entry, status, body, request_id)
        line = msgspec.json.encode(values) + b"\n"
        written = os.write(self._fd, line)
        if written < len(line):
            raise ConfigError(f"{self._path} took half of a line: the disk may be full")
        self.done[entry.id] = entry.digest
        self._count(values)
        now = time.monotonic()
        if now - self._synced > SYNC_SECONDS:
            os.fdatasync(self._fd)
            self._synced = now

    def close(self) -> None:
        """See that all is on disk, and let go of the file."""
        os.fsync(self._fd)
        os.close(self._fd)


def _is_begun(line: bytes) -> bool:
    """Tell whether *line* is an answer but for its end; a file of somebody's is not cut."""
    if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
        return False
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return False


def _is_failure(values: dict[str, Any]) -> bool:
    response = values.get("response")
    is_refused = isinstance(response, dict) and response.get("status_code") != 200
    return values.get("error") is not None or is_refused


def _reason(values: dict[str, Any]) -> str:
    """Return what the line of a failure says in words."""
    error = values.get("error")
    if error is None:
        body = values["response"].get("body")
        error = body.get("error") if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _batch_answer(entry: Entry, status: int, body: Any, request_id: str) -> dict[str, Any]:
    """Return a line as OpenAI's batch output has it."""
    values: dict[str, Any] = {"id": f"{BATCH_ID}{entry.digest}", "custom_id": entry.id}
    if not status:
        error = {"code": "invalid_line", "message": body}
        return values | {"response": None, "error": error}
    response = {"status_code": status, "request_id": request_id, "body": body}
    return values | {"response": response, "error": None}


def _answer(entry: Entry, status: int, body: Any, request_id: str) -> dict[str, Any]:
    """Return a line of the short form: text and reason of one plain choice, else all choices."""
    values: dict[str, Any] = {"id": entry.id, "request": entry.digest}
    if status != 200:
        has_error = isinstance(body, dict) and isinstance(body.get("error"), dict)
        return values | {"error": body["error"]["message"] if has_error else str(body)}
    choices = body["choices"]
    first = choices[0]
    message = first.get("message") or {}
    is_plain = len(choices) == 1 and not first.get("logprobs") and not message.get("tool_calls")
    if is_plain:
        values["text"] = first["text"] if "text" in first else message.get("content")
        values["finish_reason"] = first["finish_reason"]
    else:
        values["choices"] = choices
    return values | {"usage": body["usage"], "error": None}
