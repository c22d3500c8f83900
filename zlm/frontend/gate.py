"""Who is let in, and how much each may have: keys, quotas, and the time an answer may take.

Owns the ring of keys and this front end's way to their quotas. A key file that has changed is read
again; one that cannot be read leaves the keys as they were, and is told in the log once.
"""

import logging
import re
import time
from pathlib import Path

from zlm.api_keys import ApiKey, read_key_file
from zlm.config import ServerOptions
from zlm.errors import BadRequest, ConfigError, ZlmError, clip
from zlm.frontend.auth import KeyRing
from zlm.frontend.exchange import Exchange
from zlm.frontend.openai.fields import MAX_TIMEOUT_SECONDS
from zlm.frontend.quotas import Quotas, Remaining
from zlm.frontend.request import Request

_SECONDS = re.compile(r"[0-9]{1,8}(\.[0-9]{0,9})?")

logger = logging.getLogger(__name__)


class Gate:
    """What stands before the routes."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._options = ServerOptions()
        self._ring = KeyRing()
        self._file_state: tuple[int, int, int] | None = None  # of the key file, when it was read

    def configure(self, options: ServerOptions) -> None:
        """Take the keys of *options*, and those of its key file."""
        self._options = options
        self._file_state = None
        self._use(())
        self.refresh()

    def refresh(self) -> None:
        """Read the key file again if it has changed."""
        path = self._options.api_key_file
        if path is None:
            return
        state = _state(path)
        if state == self._file_state:
            return
        is_first = self._file_state is None
        self._file_state = state
        try:
            keys = read_key_file(path)
        except ConfigError as error:
            if is_first:  # it could be read when the server started
                raise
            logger.error("the API keys stay as they were: %s", error.message)
            return
        self._use(keys)
        if not is_first:
            logger.info("--api-key-file %s is read again: %d keys", path, len(keys))

    def _use(self, file_keys: tuple[ApiKey, ...]) -> None:
        options = self._options
        keys = (*file_keys, *options.api_keys, *options.admin_api_keys)
        self._ring = KeyRing(keys, guards=options.asks_for_keys)
        self._quotas.configure(self._ring.keys)

    def num_keys(self) -> dict[str, int]:
        """Return how many keys there are, those of the key file too."""
        admins = sum(key.admin for key in self._ring.keys)
        return {"api_keys": len(self._ring.keys) - admins, "admin_api_keys": admins}

    def check_key(self, request: Request, *, admin: bool) -> ZlmError | None:
        """Find whose *request* is; return why it is not let in, or None."""
        return self._ring.check(request, admin=admin)

    def check_quota(self, request: Request) -> ZlmError | None:
        """Return why the bearer of *request*'s key has to wait, or None."""
        if request.key is None or not request.key.is_limited:
            return None
        return self._quotas.check(request.key, time.monotonic())

    def begin(self, exchange: Exchange) -> None:
        """Count a request for its key and limit its time; raises QuotaExceeded or BadRequest."""
        exchange.limit_time(self._options.limits.request_timeout_seconds)
        exchange.limit_time(_asked_timeout(exchange.request))
        key = exchange.request.key
        if key is None or not key.is_limited:
            return
        remaining = self._quotas.begin(key, time.monotonic())
        exchange.counted = True
        exchange.extra_headers += _quota_headers(key, remaining)

    def end(self, exchange: Exchange) -> None:
        """Count what a request has used, now that it is over."""
        key = exchange.request.key
        if exchange.counted and key is not None:
            tokens = exchange.num_prompt_tokens + exchange.num_output_tokens
            self._quotas.end(key, tokens, time.monotonic())


def _state(path: str) -> tuple[int, int, int]:
    """Return what tells one version of a file from the next; zeros if it is not there."""
    try:
        facts = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns)


def _asked_timeout(request: Request) -> float | None:
    """Return the seconds that a client will wait, by its header; None if it does not say."""
    given = request.header(b"x-request-timeout").strip()
    if not given:
        return None
    if not _SECONDS.fullmatch(given) or not 0 < float(given) <= MAX_TIMEOUT_SECONDS:
        limit = f"a number of seconds over 0 and at most {MAX_TIMEOUT_SECONDS}"
        raise BadRequest(f"X-Request-Timeout must be {limit}, got {clip(given)!r}")
    return float(given)


def _quota_headers(key: ApiKey, remaining: Remaining) -> bytes:
    """Return the header lines that tell a client what it may still use in this minute."""
    lines = b""
    for what, limit, left in (
        (b"requests", key.requests_per_minute, remaining.requests),
        (b"tokens", key.tokens_per_minute, remaining.tokens),
    ):
        if limit is not None and left is not None:
            names = (what, limit, what, left)
            lines += b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\n" % names
    return lines
