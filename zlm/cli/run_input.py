"""The input of ``zlm run``: JSON lines, each a request, in one of two forms.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "a", "prompt": "..."}    {"messages": [...], "max_tokens": 50}

The first is OpenAI's batch file. In the second everything but ``id`` is the request itself; without
an id it is the line's number. What is no request is an ``Entry`` too, with the reason: its answer
says so. Lines are read one at a time; files may be larger than memory.
"""

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from zlm.errors import ConfigError, clip

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank")
BATCH_KEYS = {"custom_id", "method", "url", "body"}
# The server has one model, and each answer comes whole.
DROPPED = ("model", "stream", "stream_options")
DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. ``problem`` is why it is no request; empty if it is one.

    ``digest`` tells what the line asks under its id, whatever white space and defaults are.
    """

    id: str
    is_batch: bool  # of OpenAI's form, and so its answer
    path: str = ""
    body: bytes = b""
    problem: str = ""
    digest: str = ""


def entries(path: Path, defaults: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the requests of the file *path*; *defaults* are fields of those that lack them.

    Raises ConfigError if the file cannot be read.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)  # some editors put it there
                if line.strip():
                    entry = _entry(line, number, defaults)
                    yield replace(entry, digest=_digest(line, entry.id))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def digests(path: Path) -> dict[str, str]:
    """Return the digests of all lines of *path* by id. Raises ConfigError if one is there twice."""
    found: dict[str, str] = {}
    for entry in entries(path, {}):
        if entry.id in found:
            raise ConfigError(f"{path}: the id {clip(entry.id)} is there twice")
        found[entry.id] = entry.digest
    return found


def _digest(line: bytes, name: str) -> str:
    try:
        values = msgspec.json.decode(line)
        for key in ("id", "custom_id") if isinstance(values, dict) else ():
            values.pop(key, None)
        line = msgspec.json.encode(values, order="sorted")
    except (msgspec.MsgspecError, UnicodeDecodeError):  # it is no JSON: the line stands for itself
        line = line.strip()
    return sha256(name.encode() + b"\n" + line).hexdigest()[:DIGEST_CHARACTERS]


def _entry(line: bytes, number: int, defaults: Mapping[str, Any]) -> Entry:
    try:
        values = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Entry(str(number), False, problem=f"line {number} is no JSON: {error}")
    if not isinstance(values, dict):
        return Entry(str(number), False, problem=f"line {number} is no JSON object")
    is_batch = "body" in values
    given = values.pop("custom_id" if is_batch else "id", None)
    if given is not None and not isinstance(given, str | int):
        key = "custom_id" if is_batch else "id"
        problem = f"line {number}: {key} must be a string or a whole number"
        return Entry(str(number), is_batch, problem=problem)
    name = str(number) if given is None else str(given)
    if is_batch:
        return _batch_entry(name, number, values, defaults)
    if "prompt" not in values and "messages" not in values:
        problem = f"line {number} has neither prompt nor messages (nor body, as a batch file)"
        return Entry(name, False, problem=problem)
    if "prompt" in values and "messages" in values:
        return Entry(name, False, problem=f"line {number} has both prompt and messages: give one")
    path = PATHS[0] if "messages" in values else PATHS[1]
    return Entry(name, False, path, _body(values, defaults))


def _batch_entry(
    name: str, number: int, values: dict[str, Any], defaults: Mapping[str, Any]
) -> Entry:
    unknown = sorted(values.keys() - BATCH_KEYS)
    body, path = values["body"], values.get("url", PATHS[0])
    problem = ""
    if unknown:
        problem = f"line {number} has the unknown key {clip(unknown[0])}"
    elif not isinstance(body, dict):
        problem = f"line {number}: body must be an object"
    elif values.get("method", "POST") != "POST":
        problem = f"line {number}: method must be POST"
    elif path not in PATHS:
        problem = f"line {number}: url must be one of {', '.join(PATHS)}"
    if problem:
        return Entry(name, True, problem=problem)
    is_text = path in PATHS[:2]
    return Entry(name, True, path, _body(body, defaults if is_text else {}))


def _body(values: dict[str, Any], defaults: Mapping[str, Any]) -> bytes:
    body = {**defaults, **values}
    for key in DROPPED:
        body.pop(key, None)
    return msgspec.json.encode(body)
