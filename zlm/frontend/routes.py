"""The table of routes: path → methods → handler, and who may use them when.

Pure: knows nothing of what the handlers do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zlm.errors import MethodNotAllowed, NotFound, ZlmError, clip
from zlm.frontend.exchange import Exchange
from zlm.frontend.request import Request

Handler = Callable[[Exchange], None]


@dataclass(frozen=True, slots=True)
class Route:
    """One row: what the log and the metrics call it, and its handlers by method.

    A HEAD request goes to the GET handler. ``below`` routes take every path under theirs.
    """

    path: str
    methods: Mapping[str, Handler]
    open: bool = False  # asks for no API key
    admin: bool = False  # asks for an administrator's key
    needs_model: bool = False  # answers 503 until the server is ready, and while it drains
    takes_json: bool = False
    below: bool = False

    @property
    def works(self) -> bool:
        """Whether it has the model work: counted by quotas, refused under overload."""
        return self.needs_model and self.takes_json

    def allowed(self) -> tuple[str, ...]:
        """Return the methods of the Allow header."""
        methods = set(self.methods) | {"OPTIONS"}
        if "GET" in methods:
            methods.add("HEAD")
        return tuple(sorted(methods))

    def handler(self, method: str) -> Handler | None:
        return self.methods.get("GET" if method == "HEAD" else method)

    def check_method(self, method: str) -> ZlmError | None:
        """Return the 405 error unless *method* is in the row."""
        if self.handler(method) is not None:
            return None
        message = f"{self.path} does not take {clip(method)}, only {', '.join(self.allowed())}"
        return MethodNotAllowed(message, allow=self.allowed())


class RouteTable:
    """All rows. ``root_path`` is a prefix that a reverse proxy may have left in place."""

    def __init__(self, routes: list[Route], root_path: str = "") -> None:
        self._exact = {route.path: route for route in routes if not route.below}
        self._below = [route for route in routes if route.below]
        self._root = root_path.rstrip("/")

    def strip(self, path: str) -> str:
        """Return *path* without the root path."""
        root = self._root
        if root and path.startswith(root) and path[len(root) :].startswith("/"):
            return path[len(root) :]
        return path

    def find(self, path: str) -> Route | None:
        path = self.strip(path)
        route = self._exact.get(path)
        if route is None:
            for candidate in self._below:
                if path.startswith(candidate.path) and len(path) > len(candidate.path):
                    return candidate
        return route


def unknown_path(request: Request) -> ZlmError:
    """Return the 404 error for a path that is in no row."""
    return NotFound(f"there is no {clip(request.path)} here", code="not_found")
