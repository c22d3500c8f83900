"""One front end: which requests are let in, what state the server is in, and how it leaves.

Owns the state (loading, ready, draining), the set of connections, and the answers' common headers.
Answers health from the supervisor's ServerState alone: ``unavailable`` is the one place that says
whether the model can be served, and the place to ask the heartbeat page once there is one.
"""

import logging
import secrets
import time
from typing import Any

from zlm.config import Resolved, ServerLimits, ServerOptions
from zlm.errors import Overloaded, ZlmError, clip
from zlm.frontend.auth import KeyRing
from zlm.frontend.cors import CrossOrigin
from zlm.frontend.endpoints import Endpoints
from zlm.frontend.exchange import Exchange
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.protocol import HttpProtocol
from zlm.frontend.request import Request, check_json, safe_request_id
from zlm.frontend.routes import Route, RouteTable, unknown_path
from zlm.messages import (
    Deltas,
    DetokenizedText,
    Drain,
    EngineStats,
    Failed,
    Launch,
    Pooled,
    ServerState,
    Tokens,
)

logger = logging.getLogger("zlm.frontend.access")

RETRY_LOADING_SECONDS = 5
RETRY_DRAINING_SECONDS = 10
UNKNOWN_ROUTE = "(unknown)"


class Server:
    """The application behind every connection of this process."""

    def __init__(self, open_requests: OpenRequests, metrics: FrontendMetrics) -> None:
        # Process.
        self._open = open_requests
        self._metrics = metrics
        self.endpoints = Endpoints(open_requests, metrics, self.unavailable)
        self.connections: set[HttpProtocol] = set()
        # From the launch; until then defaults stand in.
        self.limits = ServerLimits()
        self._launched = False
        self._options = ServerOptions()
        self._use(self._options)
        # State.
        self._state = "loading"
        self._reason = ""
        self.closing = False
        self.num_answered = 0

    # ------------------------------------------------------------------- state and messages

    def configure(self, resolved: Resolved) -> None:
        """Take the configuration."""
        self._launched = True
        self._metrics.configure(resolved)
        self.endpoints.configure(resolved)
        self._use(resolved.config.server)

    def _use(self, options: ServerOptions) -> None:
        self._options = options
        self.limits = options.limits
        self._keys = KeyRing(options.api_keys)
        self._origins = CrossOrigin(options.allowed_origins)
        routes = self.endpoints.routes(open_metrics=options.open_metrics)
        self._routes = RouteTable(routes, options.root_path)

    def take(self, message: Any) -> None:
        """Handle a message of this process's inbox, except Stop."""
        match message:
            case Deltas():
                self._open.take_deltas(message)
            case Tokens() | DetokenizedText() | Pooled():
                self._open.take_result(message)
            case Failed():
                self._open.take_failure(message)
            case EngineStats():
                self._metrics.take_stats(message)
            case ServerState():
                self._state, self._reason = message.state, message.reason
            case Launch():
                self.configure(message.resolved)
            case Drain():
                self.drain(abort=message.abort)
            case _:
                raise TypeError(f"a front end does not take {type(message).__name__}")

    def unavailable(self) -> ZlmError | None:
        """Return why the model cannot be served at this moment, or None."""
        if self.closing or self._state == "draining":
            message = self._reason or "the server is shutting down"
            return Overloaded(message, retry_after_seconds=RETRY_DRAINING_SECONDS)
        if self._state != "ready" or not self._launched:
            message = self._reason or "the model is loading"
            return Overloaded(message, retry_after_seconds=RETRY_LOADING_SECONDS)
        return None

    def drain(self, *, abort: bool) -> None:
        """Let no more requests in; with *abort* end the open ones."""
        self.closing = True
        if abort:
            self._open.fail_all(self.unavailable() or Overloaded("the server is shutting down"))
        for connection in list(self.connections):
            connection.close_if_idle()

    # ---------------------------------------------------------------- for the connections

    def admit(self, request: Request) -> ZlmError | None:
        """Return why *request* is refused before its body is read, or None."""
        if request.method == "OPTIONS":
            return None
        route = self._routes.find(request.path)
        if route is None or not route.open:
            # Whose keys open the door is known only from the launch on.
            error = self._keys.check(request) if self._launched else self.unavailable()
            if error is not None:
                return error
        if route is None:
            return unknown_path(request)
        return self._admit_to(route, request)

    def _admit_to(self, route: Route, request: Request) -> ZlmError | None:
        error = route.check_method(request.method)
        if error is None and route.needs_model:
            error = self.unavailable()
        if error is None and route.takes_json:
            error = check_json(request) or self._overloaded()
        return error

    def _overloaded(self) -> ZlmError | None:
        most = self.limits.max_concurrent_requests
        if len(self._open) < most:
            return None
        return Overloaded(f"{most} requests are open, which is the limit; try again")

    def begin(self, exchange: Exchange) -> None:
        """Name *exchange* and give it the headers every answer has."""
        request = exchange.request
        route = self._routes.find(request.path)
        exchange.route = UNKNOWN_ROUTE if route is None else route.path
        given = safe_request_id(request.header(b"x-request-id"))
        if not given and route is not None and not route.open:
            given = secrets.token_hex(16)
        exchange.request_id = given
        exchange.extra_headers = self._origins.headers(request)

    def handle(self, exchange: Exchange) -> None:
        """Answer *exchange*, or have it answered later."""
        request = exchange.request
        if request.method == "OPTIONS":
            exchange.respond(204, headers=self._origins.preflight_headers(request))
            return
        route = self._routes.find(request.path)
        handler = None if route is None else route.handler(request.method)
        assert handler is not None, "a request was let in without a handler"
        if route is not None and route.takes_json:
            error = self._overloaded() or self.unavailable()
            if error is not None:
                raise error
        handler(exchange)

    def finished(self, exchange: Exchange) -> None:
        """Count and log an answer."""
        request = exchange.request
        self.num_answered += 1
        self._metrics.count_answer(exchange.route, request.method or "-", exchange.status)
        if not self._options.log_requests:
            return
        level = logging.INFO if exchange.route.startswith(("/v1/", "(", "/tok", "/detok")) else 10
        logger.log(
            level,
            "%s %s %d %.3fs prompt=%d output=%d id=%s%s",
            request.method or "-",
            clip(request.target.partition("?")[0]),
            exchange.status,
            time.monotonic() - exchange.received,
            exchange.num_prompt_tokens,
            exchange.num_output_tokens,
            exchange.request_id or "-",
            f" cut off: {exchange.fault}" if exchange.fault else "",
        )
