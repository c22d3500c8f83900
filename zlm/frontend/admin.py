"""The routes of administration: for those who show an administrator's key.

What concerns other processes goes to the supervisor as ``Administer`` and comes back as
``Administered``, once from each process that did it. Owns the calls that wait for that. Knows
nothing of how the others do it.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from zlm import __version__
from zlm.api_keys import without_credentials
from zlm.config import Resolved
from zlm.errors import Aborted, BadRequest, DeadlineExceeded, ZlmError
from zlm.frontend import sse
from zlm.frontend.exchange import Exchange
from zlm.frontend.openai.body import BodyDecoder
from zlm.frontend.openai.operations_admin import AbortRequest
from zlm.frontend.protocol import HttpProtocol
from zlm.frontend.routes import Route
from zlm.messages import Action, Administer, Administered
from zlm.metrics import EngineStats

CALL_SECONDS = 5.0  # for the others to do what was asked of them
MAX_NAMES = 1024
NO_RETRY = b"x-should-retry: false\r\n"  # OpenAI's clients then do not, whatever the status
MAX_NAME_CHARACTERS = 256


abort_decoder = BodyDecoder(AbortRequest)


class Call:
    """One question to other processes, which *expected* of them answer."""

    __slots__ = ("count", "exchange", "expected")

    def __init__(self, exchange: Exchange, expected: int) -> None:
        self.exchange = exchange
        self.expected = expected
        self.count = 0


class Administration:
    """The handlers. *connections* are those of this front end.

    *new_id* gives an id that says which front end it is of; *load* tells how many requests are
    open, and what the engine core has counted, *state* that of the server, *num_keys* how many keys
    there are. ``ask`` is set once the supervisor can be reached.
    """

    def __init__(
        self,
        connections: set[HttpProtocol],
        new_id: Callable[[], int],
        load: Callable[[], tuple[int, EngineStats]],
        state: Callable[[], str],
        num_keys: Callable[[], dict[str, int]],
    ) -> None:
        self._connections = connections
        self._new_id = new_id
        self._load = load
        self._state = state
        self._num_keys = num_keys
        self._calls: dict[int, Call] = {}
        self._resolved: Resolved | None = None
        self._started = time.monotonic()
        self.ask: Callable[[Administer], None] | None = None

    def configure(self, resolved: Resolved) -> None:
        """Take what is served."""
        self._resolved = resolved

    def routes(self) -> list[Route]:
        """Return the rows of the table."""
        return [
            Route("/server_info", {"GET": self.server_info}, admin=True),
            Route("/load", {"GET": self.load}, admin=True),
            Route("/is_sleeping", {"GET": self.is_sleeping}, admin=True),
            Route("/sleep", {"POST": self.sleep}, admin=True, needs_model=True),
            Route("/wake_up", {"POST": self.wake_up}, admin=True),
            Route(
                "/reset_prefix_cache",
                {"POST": self.reset_prefix_cache},
                admin=True,
                needs_model=True,
            ),
            Route("/abort_requests", {"POST": self.abort_requests}, admin=True, takes_json=True),
        ]

    # ---------------------------------------------------------------------------- what there is

    def server_info(self, exchange: Exchange) -> None:
        exchange.respond(200, sse.encode(self._info()))

    def _info(self) -> dict[str, Any]:
        resolved = self._serving()
        told = without_credentials(msgspec.json.encode(resolved.config).decode())
        config = msgspec.json.decode(told)
        for name in ("api_keys", "admin_api_keys"):
            del config["server"][name]
        return {
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "served_model_names": resolved.served_names,
            "model_path": resolved.model_path,
            "architecture": resolved.spec.architecture,
            "device": resolved.device,
            "max_model_len": resolved.max_model_len,
            "max_num_seqs": resolved.max_num_seqs,
            "max_num_batched_tokens": resolved.max_num_batched_tokens,
            "num_front_ends": resolved.num_front_ends,
            "num_tokenizers": resolved.num_tokenizers,
            "num_keys": self._num_keys(),
            "config": config,
        }

    def load(self, exchange: Exchange) -> None:
        num_open, stats = self._load()
        body = {
            "server_load": num_open,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_cache_usage": round(stats.kv_usage, 4),
        }
        exchange.respond(200, sse.encode(body))

    # ---------------------------------------------------------------------------- what to do

    def reset_prefix_cache(self, exchange: Exchange) -> None:
        self._call(exchange, "reset_prefix_cache", expected=1)

    def abort_requests(self, exchange: Exchange) -> None:
        server = self._serving().config.server
        request = abort_decoder.decode(exchange.request.body, server.unknown_fields)
        names = _checked(request)
        self._call(exchange, "abort_requests", names, expected=server.api_server_count or 1)

    def sleep(self, exchange: Exchange) -> None:
        self._call(exchange, "sleep", expected=1)

    def wake_up(self, exchange: Exchange) -> None:
        self._call(exchange, "wake_up", expected=1)

    def is_sleeping(self, exchange: Exchange) -> None:
        exchange.respond(200, sse.encode({"is_sleeping": self._state() == "sleeping"}))

    def _call(
        self, exchange: Exchange, action: Action, names: Sequence[str] = (), *, expected: int
    ) -> None:
        assert self.ask is not None, "an administrator was let in before the launch"
        number = self._new_id()
        self._calls[number] = Call(exchange, expected)
        exchange.limit_time(CALL_SECONDS)
        exchange.on_disconnect = partial(self._forget, number)
        exchange.on_abort = partial(self._give_up, number)
        self.ask(Administer(number, action, list(names)))

    def take(self, message: Administered) -> None:
        """Take what one process has done; the last answer ends the call."""
        call = self._calls.get(message.call)
        if call is None:  # the client is gone, or it took too long
            return
        call.count += message.count
        call.expected -= 1
        if not call.expected:
            del self._calls[message.call]
            call.exchange.respond(200, sse.encode({"count": call.count}))

    def _forget(self, number: int) -> None:
        del self._calls[number]

    def _give_up(self, number: int, error: ZlmError) -> None:
        exchange = self._calls.pop(number).exchange
        if isinstance(error, DeadlineExceeded):
            error = DeadlineExceeded(f"not every process has answered within {CALL_SECONDS:g} s")
        exchange.respond_error(error)

    def perform(self, message: Administer) -> Administered:
        """Do what an administrator asks of this front end: end requests by their names."""
        assert message.action == "abort_requests"
        wanted = set(message.names)
        error = Aborted("the request was aborted by an administrator")
        asking = [call.exchange for call in self._calls.values()]
        count = 0
        for connection in list(self._connections):
            exchange = connection.exchange
            if exchange is None or exchange.on_abort is None or exchange in asking:
                continue
            if not wanted or wanted.intersection((exchange.request_id, *exchange.names)):
                exchange.extra_headers += NO_RETRY
                exchange.abort(error)
                count += 1
        return Administered(message.call, count)

    def _serving(self) -> Resolved:
        assert self._resolved is not None, "an administrator was let in before the launch"
        return self._resolved


def _checked(request: AbortRequest) -> list[str]:
    """Return the names to abort; none stand for all requests."""
    names = request.request_ids
    if bool(request.all) == (names is not None):
        raise BadRequest("give either request_ids or all: true", param="request_ids")
    if names is None:
        return []
    if not 1 <= len(names) <= MAX_NAMES:
        message = f"request_ids must have 1 to {MAX_NAMES} entries, got {len(names)}"
        raise BadRequest(message, param="request_ids")
    if not all(1 <= len(name) <= MAX_NAME_CHARACTERS for name in names):
        message = f"request_ids must have 1 to {MAX_NAME_CHARACTERS} characters each"
        raise BadRequest(message, param="request_ids")
    return names
