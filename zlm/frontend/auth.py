"""API keys: which requests must bring one, and whose it is.

Holds digests, never keys. A key is looked up by its digest, so that the time it takes tells nothing
of how near a guess came, however many keys there are; the digest that is found is then compared in
constant time.
"""

import hmac
from collections.abc import Iterable
from hashlib import sha256

from zlm.api_keys import ApiKey
from zlm.errors import Forbidden, Unauthorized, ZlmError
from zlm.frontend.request import Request


class KeyRing:
    """The keys that open the guarded routes; with *guards* nobody gets in without one.

    Else only what is an administrator's asks for a key.
    """

    def __init__(self, keys: Iterable[ApiKey] = (), *, guards: bool = False) -> None:
        self._keys = {key.sha256: key for key in keys}
        self._guards = guards
        self._has_admin = any(key.admin for key in self._keys.values())

    @property
    def keys(self) -> list[ApiKey]:
        return list(self._keys.values())

    def check(self, request: Request, *, admin: bool = False) -> ZlmError | None:
        """Find *request*'s key, and return why it is not let in, or None."""
        request.key = self._find(request)
        if admin:
            return self._check_admin(request)
        if request.key is not None or not self._guards:
            return None
        return self._unauthorized(request)

    def _check_admin(self, request: Request) -> ZlmError | None:
        if not self._has_admin:
            return Forbidden("administration is off: the server has no --admin-api-key")
        if request.key is None:
            return self._unauthorized(request)
        if not request.key.admin:
            return Forbidden("this needs the key of an administrator")
        return None

    def _find(self, request: Request) -> ApiKey | None:
        given = _bearer(request)
        if not given or not self._keys:
            return None
        digest = sha256(given).hexdigest()
        known = self._keys.get(digest)
        if known is None or not hmac.compare_digest(known.sha256, digest):
            return None
        return known

    @staticmethod
    def _unauthorized(request: Request) -> ZlmError:
        if not _bearer(request):
            return Unauthorized("an API key is needed: send it as Authorization: Bearer KEY")
        return Unauthorized("the API key is not one of this server's")


def _bearer(request: Request) -> bytes:
    """Return the key that *request* brings; empty if it brings none."""
    scheme, _, key = request.headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
