"""API keys as the server keeps them: a digest, a name, and what the key's bearer may use.

The key itself is kept nowhere: whoever reads a process's memory, a message or a log finds digests.
Reads the key file. Imports nothing of zlm but the error tree.
"""

import re
from hashlib import sha256
from pathlib import Path

import msgspec

from zlm.errors import ConfigError

MAX_KEY_BYTES = 1 << 20  # of a key file
MAX_KEYS = 1024
MAX_NAME_CHARACTERS = 64
MOST = 2**40  # requests or tokens a minute
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
_NAME = re.compile(r"[A-Za-z0-9._:@-]+")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key. ``None`` limits nothing."""

    sha256: str  # hexadecimal digest of the key
    name: str = ""  # what the log calls its bearer; empty: nothing
    admin: bool = False  # opens the routes of administration, too
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs together
    concurrency: int | None = None  # requests that are open at once

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to count."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrency)
        return any(limit is not None for limit in limits)


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of the key file that says more than the key."""

    key: str | None = None
    sha256: str | None = None
    name: str = ""
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


def api_key(text: str, *, admin: bool = False, flag: str = "--api-key") -> ApiKey:
    """Return the key *text*; raise ConfigError, without repeating it, if no header can hold it."""
    if not (text and text.isascii() and text.isprintable() and " " not in text):
        what = f"{flag}: a key" if flag else "a key"
        raise ConfigError(f"{what} must be printable ASCII without spaces, and not empty")
    return ApiKey(sha256=sha256(text.encode()).hexdigest(), admin=admin)


def without_credentials(text: str) -> str:
    """Return *text* with name and password taken out of the URLs in it."""
    return _CREDENTIALS.sub("//...@", text)


def read_key_file(path: str) -> tuple[ApiKey, ...]:
    """Return the keys of a file: each line a key, or a JSON object with ``key`` or ``sha256``.

    Raises ConfigError with the number of the line that is wrong, and nothing of what is in it.
    """
    try:
        content = Path(path).read_bytes()[: MAX_KEY_BYTES + 1].decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {_reason(error)}") from None
    if len(content) > MAX_KEY_BYTES:
        raise ConfigError(f"--api-key-file {path}: the limit is {MAX_KEY_BYTES} bytes")
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            key = _read_line(line.strip())
        except ConfigError as error:
            raise ConfigError(f"--api-key-file {path}, line {number}: {error.message}") from None
        if key is None:
            continue
        if key.sha256 in keys:
            raise ConfigError(f"--api-key-file {path}, line {number}: this key stands there twice")
        keys[key.sha256] = key
    if not keys:
        raise ConfigError(f"--api-key-file {path}: there is no key in it")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"--api-key-file {path}: {len(keys)} keys, the limit is {MAX_KEYS}")
    return tuple(keys.values())


def _read_line(line: str) -> ApiKey | None:
    if not line.startswith("{"):
        text = line.partition("#")[0].strip()
        return api_key(text, flag="") if text else None
    try:
        given = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:  # msgspec names the field and the types, not the value
        raise ConfigError(str(error)) from None
    if (given.key is None) == (given.sha256 is None):
        raise ConfigError("give either key or sha256")
    if given.sha256 is not None and not _DIGEST.fullmatch(given.sha256):
        raise ConfigError("sha256 must be 64 hexadecimal digits")
    if given.name and not (_NAME.fullmatch(given.name) and len(given.name) <= MAX_NAME_CHARACTERS):
        raise ConfigError(
            f"name must be at most {MAX_NAME_CHARACTERS} letters, digits or any of . _ : @ -"
        )
    limits = {
        "requests_per_minute": given.requests_per_minute,
        "tokens_per_minute": given.tokens_per_minute,
        "concurrency": given.concurrency,
    }
    for field, limit in limits.items():
        if limit is not None and not 1 <= limit <= MOST:
            raise ConfigError(f"{field} must be between 1 and {MOST}, got {limit}")
    digest = given.sha256 if given.key is None else api_key(given.key, flag="key").sha256
    assert digest is not None
    return ApiKey(sha256=digest.lower(), name=given.name, admin=given.admin, **limits)


def _reason(error: Exception) -> str:
    """Return why a file could not be read, without a byte of it."""
    return error.strerror or "unreadable" if isinstance(error, OSError) else "it is not UTF-8"
