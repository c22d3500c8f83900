"""Cross-origin headers, so that pages in a browser may call the server.

Every answer carries them, errors too: a browser hides an answer without them from its page.
"""

from zlm.frontend.request import Request

_EXPOSED = (
    b"access-control-expose-headers: x-request-id, retry-after, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens\r\n"
)
_PREFLIGHT = (
    b"access-control-allow-methods: GET, HEAD, POST, OPTIONS\r\naccess-control-max-age: 600\r\n"
)


class CrossOrigin:
    """Header lines for the *allowed* origins; ``*`` allows every one."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._any = "*" in allowed
        self._allowed = {origin.encode() for origin in allowed}

    def headers(self, request: Request) -> bytes:
        """Return the lines of any answer to *request*."""
        if self._any:
            return b"access-control-allow-origin: *\r\n" + _EXPOSED
        origin = request.headers.get(b"origin", b"")
        if origin in self._allowed:
            return b"access-control-allow-origin: %b\r\nvary: origin\r\n%b" % (origin, _EXPOSED)
        return b"vary: origin\r\n"

    def preflight_headers(self, request: Request) -> bytes:
        """Return the further lines of the answer to an OPTIONS request."""
        wanted = request.headers.get(b"access-control-request-headers", b"*")
        return _PREFLIGHT + b"access-control-allow-headers: %b\r\n" % wanted
