"""The web page at / and its files under /ui/: open to all, because they hold no data.

What the page shows it fetches, with a key where the server asks for one. Every file is sent with
headers under which a browser runs nothing but these files and talks to nobody but this server.
"""

import base64
import hashlib
import re
from pathlib import Path

from zlm.errors import NotFound, clip
from zlm.frontend.exchange import Exchange
from zlm.frontend.routes import Route

FOLDER = Path(__file__).with_name("ui")
DOCS_PAGE = Path(__file__).with_name("docs.html")
TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    "content-security-policy: default-src 'none'; script-src {scripts}; style-src {styles}; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'\r\n"
    "x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\n"
    "cross-origin-opener-policy: same-origin\r\ncache-control: no-cache\r\n"
)
HEADERS = _POLICY.format(scripts="'self'", styles="'self'").encode()


class Page:
    """The handlers. Files are read when they are first asked for."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def routes(self) -> list[Route]:
        """Return the rows of the table."""
        return [
            Route("/", {"GET": self.index}, open=True),
            Route("/ui/", {"GET": self.file}, open=True, below=True),
        ]

    def index(self, exchange: Exchange) -> None:
        self._send(exchange, "index.html")

    def file(self, exchange: Exchange) -> None:
        self._send(exchange, exchange.request.path.rpartition("/ui/")[2])

    def _send(self, exchange: Exchange, name: str) -> None:
        if not self._files:
            self._files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
        body = self._files.get(name)
        if body is None:
            raise NotFound(f"there is no {clip(exchange.request.path)} here", code="not_found")
        kind = TYPES[Path(name).suffix]
        exchange.respond(200, body, content_type=kind, headers=HEADERS)


def docs(exchange: Exchange) -> None:
    """Answer with the page of all routes, whose script and style stand in it."""
    text = DOCS_PAGE.read_text()
    headers = _POLICY.format(scripts=_digest(text, "script"), styles=_digest(text, "style"))
    body = text.encode()
    exchange.respond(200, body, content_type=TYPES[".html"], headers=headers.encode())


def _digest(page: str, tag: str) -> str:
    """Return the source of a policy that allows the one element *tag* of *page*."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert found is not None, f"the page has no {tag}"
    digest = hashlib.sha256(found.group(1).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
