"""API keys: which requests must bring one, compared in constant time.

Keys are never logged and never leave this object.
"""

import hmac
from hashlib import sha256

from zlm.errors import Unauthorized, ZlmError
from zlm.frontend.request import Request


class KeyRing:
    """The keys that open the guarded routes; without any, every request is let in."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        # Digests have one length, so neither the number of equal characters nor the length shows.
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, request: Request) -> ZlmError | None:
        """Return the 401 error unless *request* brings one of the keys as a Bearer token."""
        if not self._digests:
            return None
        scheme, _, key = request.headers.get(b"authorization", b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            return Unauthorized("an API key is needed: send it as Authorization: Bearer KEY")
        digest = sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return None if any(matches) else Unauthorized("the API key is not one of this server's")
