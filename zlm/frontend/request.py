"""One HTTP request as the parser delivers it, and what its headers say.

Pure values: knows no socket, no route, no JSON.
"""

import re
from urllib.parse import unquote

from zlm.api_keys import ApiKey
from zlm.errors import UnsupportedMediaType, ZlmError, clip

MAX_REQUEST_ID_CHARACTERS = 128
_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")


class Request:
    """One request. Filled by ``RequestParser``, whole once the parser hands it out.

    ``error`` set: it must be answered with that, whatever it asked for. ``unread`` set: bytes of
    its body were left on the connection, which therefore cannot carry another request.
    """

    __slots__ = (
        "body",
        "error",
        "headers",
        "keep_alive",
        "key",
        "method",
        "path",
        "target",
        "unread",
        "version",
    )

    def __init__(self) -> None:
        self.method = ""
        self.target = ""  # as sent: ASCII, path and query
        self.path = ""  # percent-decoded, without the query
        self.version = "1.1"
        self.headers: dict[bytes, bytes] = {}  # names in lower case; repeated ones joined by ", "
        self.keep_alive = False
        self.key: ApiKey | None = None  # that it brought, once that is checked
        self.body: bytes | bytearray = b""
        self.error: ZlmError | None = None
        self.unread = False

    def set_target(self, target: bytes) -> None:
        """Take the request target in origin form, absolute form or as an asterisk."""
        self.target = target.decode("latin-1")
        path = self.target.partition("?")[0]
        if not path.startswith("/") and "://" in path:
            path = "/" + path.partition("://")[2].partition("/")[2]
        self.path = unquote(path, errors="replace") if "%" in path else path

    def header(self, name: bytes) -> str:
        """Return the value of the header *name* (lower case), or an empty string."""
        return self.headers.get(name, b"").decode("latin-1")


def check_json(request: Request) -> ZlmError | None:
    """Return an error unless the body is declared as plain JSON (or not declared at all)."""
    declared = request.header(b"content-type").partition(";")[0].strip().lower()
    if declared and declared != "application/json" and not declared.endswith("+json"):
        return UnsupportedMediaType(
            f"Content-Type is {clip(declared)}, this endpoint takes application/json"
        )
    coding = request.header(b"content-encoding").strip().lower()
    if coding and coding != "identity":
        return UnsupportedMediaType(
            f"Content-Encoding is {clip(coding)}, send the body uncompressed"
        )
    return None


def safe_request_id(text: str) -> str:
    """Return a client's request id without unsafe characters, cut to its limit; may be empty."""
    return _UNSAFE_IN_ID.sub("", text[: 4 * MAX_REQUEST_ID_CHARACTERS])[:MAX_REQUEST_ID_CHARACTERS]
