"""One front end: which requests are let in, what state the server is in, and how it leaves.

Owns the state (loading, ready, draining), the set of connections, and the answers' common headers.
``unavailable`` is the one place that says whether the model can be served, which is the
supervisor's word; ``unhealthy`` also says whether all that is behind it gets on, from heartbeats.
"""

import resource
import secrets
from pathlib import Path
from typing import Any

import msgspec

from zlm.config import Resolved, ServerLimits, ServerOptions
from zlm.errors import Overloaded, ZlmError
from zlm.frontend import access_log
from zlm.frontend.admin import Administration
from zlm.frontend.cors import CrossOrigin
from zlm.frontend.dashboard import Dashboard
from zlm.frontend.endpoints import Endpoints
from zlm.frontend.exchange import Exchange
from zlm.frontend.gate import Gate
from zlm.frontend.health import Health
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.page import Page
from zlm.frontend.parser import BodyMemory
from zlm.frontend.protocol import HttpProtocol
from zlm.frontend.quotas import Quotas
from zlm.frontend.recent import RecentRequests
from zlm.frontend.request import Request, check_json, safe_request_id
from zlm.frontend.routes import Route, RouteTable, unknown_path
from zlm.frontend.traces import Tracer
from zlm.messages import (
    Administered,
    Deltas,
    DetokenizedText,
    Drain,
    Failed,
    Launch,
    Pooled,
    ServerState,
    Tokens,
)

RETRY_LOADING_SECONDS = 5
RETRY_DRAINING_SECONDS = 10
UNKNOWN_ROUTE = "(unknown)"
OTHER_DESCRIPTORS = 128  # that a front end needs beside those of its connections


class Server:
    """The application behind every connection of this process."""

    def __init__(
        self,
        open_requests: OpenRequests,
        metrics: FrontendMetrics,
        quotas: Quotas | None = None,
        recent: RecentRequests | None = None,
        *,
        runtime: Path | None = None,
        ui: bool = True,
    ) -> None:
        # Process.
        self._open = open_requests
        self._metrics = metrics
        self._tracer: Tracer | None = None
        self.gate = Gate(quotas or Quotas(0))
        self.endpoints = Endpoints(open_requests, metrics, self.unhealthy)
        self.connections: set[HttpProtocol] = set()
        self.waiting: dict[HttpProtocol, None] = {}
        self.body_memory = BodyMemory()
        self.admin = Administration(
            self.connections,
            open_requests.new_id,
            metrics.load,
            lambda: self._state,
            self.gate.num_keys,
        )
        self._recent = recent or RecentRequests(0)
        self._page = Page()
        self.dashboard = Dashboard(
            metrics, self._recent, lambda: (self._state, self._reason), runtime
        )
        # From the launch; until then defaults stand in.
        self.limits = ServerLimits()
        self._launched = False
        self._options = ServerOptions(ui=ui)
        self._use(self._options)
        # State.
        self._state = "loading"
        self._reason = ""
        self._retry_after = 0
        self.health: Health | None = None  # from the launch
        self.closing = False
        self.num_answered = 0

    # ------------------------------------------------------------------- state and messages

    def configure(self, resolved: Resolved) -> None:
        """Take the configuration."""
        self._launched = True
        self._metrics.configure(resolved)
        self.endpoints.configure(resolved)
        self.admin.configure(resolved)
        self.dashboard.configure(resolved)
        self._use(resolved.config.server)

    def _use(self, options: ServerOptions) -> None:
        self._options = options
        self.limits = _with_descriptors(options.limits)
        self.gate.configure(options)
        self._origins = CrossOrigin(options.allowed_origins)
        routes = self.endpoints.routes(open_metrics=options.open_metrics) + self.admin.routes()
        if options.ui:
            routes += self._page.routes() + self.dashboard.routes()
        self._working = {route.path for route in routes if route.works}
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
            case ServerState():
                self._state, self._reason = message.state, message.reason
                self._retry_after = message.retry_after_seconds
            case Administered():
                self.admin.take(message)
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
            seconds = self._retry_after or RETRY_LOADING_SECONDS
            return Overloaded(message, retry_after_seconds=seconds)
        return None

    def unhealthy(self) -> ZlmError | None:
        """Return why the model cannot be served, or will not get on if it is asked, or None."""
        error = self.unavailable()
        if error is None and not self._open.has_tokenizer:
            error = Overloaded("every tokenizer is being restarted")
        if error is None and self.health is not None:
            error = self.health.problem()
        return error

    def drain(self, *, abort: bool) -> None:
        """Let no more requests in; with *abort* end the open ones."""
        self.closing = True
        self.dashboard.close()
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
            is_admin = route is not None and route.admin
            error = self.gate.check_key(request, admin=is_admin)
            if not self._launched:
                error = self.unavailable()
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
            error = check_json(request)
        if error is None and route.works:
            error = self._overloaded() or self.gate.check_quota(request)
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
        if route is not None and route.works:
            error = self._overloaded() or self.unavailable()
            if error is not None:
                raise error
            self.gate.begin(exchange)
        handler(exchange)

    def finished(self, exchange: Exchange) -> None:
        """Count and log an answer."""
        self.gate.end(exchange)
        self.num_answered += 1
        self._metrics.finished(exchange)
        if self._options.log_requests:
            access_log.log(exchange)
        if self._options.ui and exchange.route in self._working:
            self._recent.note(exchange)
        if self._tracer is not None and exchange.route not in access_log.QUIET:
            self._tracer.record(exchange)

    def trace_to(self, tracer: Tracer) -> None:
        """Have *tracer* told of each request from now on; it is this object's to close."""
        self._tracer = tracer

    def close(self) -> None:
        """Send what waits to be sent of traces. May take seconds."""
        if self._tracer is not None:
            self._tracer.close()


def _with_descriptors(limits: ServerLimits) -> ServerLimits:
    """Return *limits* with no more connections than the system gives this process descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return limits
    most = max(1, min(limits.max_connections, hard - OTHER_DESCRIPTORS))
    return msgspec.structs.replace(limits, max_connections=most)
