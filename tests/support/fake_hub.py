"""A small Hugging Face hub on loopback: enough of its HTTP API for the real huggingface_hub.

Repositories are dictionaries of file contents. It counts what is asked of it, can cut a body
short, refuse without a token, and be closed to play a broken network.
"""

import contextlib
import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_right"


class FakeHub:
    """Owns a server thread. ``requests`` lists (method, path, Range header) in order."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.damaged_once: set[str] = set()  # file names: a byte of the body is another
        self.cut_once: dict[str, int] = {}  # file name: bytes after which its body breaks off
        self.requests: list[tuple[str, str, str | None]] = []
        self.connections: list[socket.socket] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Drop every connection and stop listening: the network is down. Harmless when repeated."""
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # its client has left already
                connection.shutdown(socket.SHUT_RDWR)

    def fetched(self) -> list[str]:
        """Return the names of files whose contents were asked for."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        return [path.rsplit("/", 1)[1] for path in paths if "/resolve/" in path]


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            hub.connections.append(self.request)
            super().setup()

        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def log_message(self, *arguments: object) -> None:
            """Say nothing on stderr."""

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if match := re.fullmatch(r"/api/models/(.+?)/tree/([^/]+)", path):
                self.tree(*match.groups())
            elif match := re.fullmatch(r"/api/models/(.+?)(?:/revision/([^/]+))?", path):
                self.info(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
                self.file(*match.groups())
            else:
                self.refuse(404, "EntryNotFound")

        def known(self, repository: str, revision: str) -> bool:
            if repository not in hub.repositories:
                self.refuse(401, "RepoNotFound")
            elif revision not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                return True
            return False

        def info(self, repository: str, revision: str) -> None:
            if self.known(repository, revision):
                names = hub.repositories[repository]
                siblings = [{"rfilename": name} for name in names]
                self.json({"id": repository, "sha": COMMIT, "siblings": siblings})

        def tree(self, repository: str, revision: str) -> None:
            if self.known(repository, revision):
                files = hub.repositories[repository].items()
                self.json(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": _etag(data, name)}
                        for name, data in files
                    ]
                )

        def file(self, repository: str, revision: str, name: str) -> None:
            if not self.known(repository, revision):
                return
            if repository in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.refuse(401, "GatedRepo")
                return
            data = hub.repositories[repository][name]
            start = int(re.sub(r"\D", "", self.headers.get("Range", "0")))
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{_etag(data, name)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            if name in hub.damaged_once:
                hub.damaged_once.remove(name)
                data = data[:-1] + bytes((data[-1] ^ 1,))
            cut = hub.cut_once.pop(name, None)
            self.wfile.write(data[start:cut])
            if cut is not None:
                self.close_connection = True

        def json(self, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


def _etag(data: bytes, name: str) -> str:
    """Return the sum that the hub names a file by: SHA-256 for what it stores as large."""
    if name.endswith((".safetensors", ".gguf")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(data).hexdigest()
