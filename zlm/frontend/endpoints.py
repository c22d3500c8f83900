"""What each route does: from a whole request to an answer, or to a command for the tokenizer.

Holds the resolved configuration once it is known. Errors are raised as ZlmError; the connection
turns them into answers.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from zlm import __version__
from zlm.config import Resolved, ServerOptions
from zlm.errors import BadRequest, NotFound, ZlmError
from zlm.frontend import metrics, page, sse
from zlm.frontend.exchange import Exchange
from zlm.frontend.generation import Generation
from zlm.frontend.open_requests import OpenRequests, unfit
from zlm.frontend.openai import chat, completions, embeddings, fields, models, openapi, tokenize
from zlm.frontend.openai.answer import AnswerForm
from zlm.frontend.pooling_endpoints import PoolingEndpoints
from zlm.frontend.request import safe_request_id
from zlm.frontend.routes import Handler, Route
from zlm.frontend.tokenizer_call import TokenizerCall
from zlm.messages import Generate, Message, Pool

# Endpoints of OpenAI's API and its relatives that are not there yet, and what may serve instead.
ABSENT = {
    **dict.fromkeys(("/v1/responses", "/v1/messages"), "; use /v1/chat/completions"),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), ": adapters are not served yet"
    ),
}


class Endpoints:
    """The handlers. *unavailable* says why the server cannot serve its model now, or None."""

    def __init__(
        self,
        open_requests: OpenRequests,
        counts: metrics.FrontendMetrics,
        unavailable: Callable[[], ZlmError | None],
    ) -> None:
        self._open = open_requests
        self._counts = counts
        self._unavailable = unavailable
        self._started = int(time.time())
        self._resolved: Resolved | None = None
        self._openapi = b""  # the document, once somebody has asked for it

    def configure(self, resolved: Resolved) -> None:
        """Take what is served."""
        self._resolved = resolved
        self._openapi = b""

    def routes(self, *, open_metrics: bool) -> list[Route]:
        """Return the table of all routes."""
        probes = {
            "/health": self.health,
            "/health/ready": self.health,
            "/health/live": self.alive,
            "/ping": self.health,
            "/version": self.version,
        }
        pooling = PoolingEndpoints(
            self._serving, self._open.new_id, self._pool, self._check_template
        )
        generating: dict[str, Handler] = {
            **pooling.handlers(),
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        absent = {"POST": self.absent, "GET": self.absent, "DELETE": self.absent}
        return [
            *(Route(path, {"GET": handler}, open=True) for path, handler in probes.items()),
            *(
                Route(path, {"POST": handler}, needs_model=True, takes_json=True)
                for path, handler in generating.items()
            ),
            Route("/metrics", {"GET": self.metrics}, open=open_metrics),
            Route("/openapi.json", {"GET": self.openapi}),
            Route("/docs", {"GET": page.docs}, open=True),
            Route("/v1/models", {"GET": self.models}, needs_model=True),
            Route("/v1/models/", {"GET": self.model}, needs_model=True, below=True),
            *(Route(path, absent) for path in ABSENT),
        ]

    def _serving(self) -> Resolved:
        assert self._resolved is not None, "a model route was let in before the launch"
        return self._resolved

    def _server(self) -> ServerOptions:
        return self._serving().config.server

    # ------------------------------------------------------------------------------- probes

    def alive(self, exchange: Exchange) -> None:
        exchange.respond(200)

    def health(self, exchange: Exchange) -> None:
        error = self._unavailable()
        if error is not None:
            raise error
        exchange.respond(200)

    def version(self, exchange: Exchange) -> None:
        exchange.respond(200, sse.encode({"version": __version__}))

    def metrics(self, exchange: Exchange) -> None:
        self._counts.show_queues(len(self._open), self._open.loads)
        text = self._counts.render()
        exchange.respond(200, text, content_type=metrics.CONTENT_TYPE)

    def openapi(self, exchange: Exchange) -> None:
        if not self._openapi:
            server = self._server()
            described = openapi.document(
                root_path=server.root_path,
                forbid_unknown=server.unknown_fields != "ignore",
                keys=server.asks_for_keys,
                open_metrics=server.open_metrics,
                vocab_size=self._serving().spec.vocab_size,
                limits=server.limits.sampling,
                admin=bool(server.admin_api_keys) or server.api_key_file is not None,
            )
            self._openapi = sse.encode(described)
        exchange.respond(200, self._openapi)

    def absent(self, exchange: Exchange) -> None:
        instead = ABSENT[exchange.route]
        raise NotFound(
            f"{exchange.route} is not offered by this version{instead}", code="not_found"
        )

    # ------------------------------------------------------------------------------- models

    def models(self, exchange: Exchange) -> None:
        listed = models.model_list(self._serving(), self._started)
        exchange.respond(200, sse.encode(listed))

    def model(self, exchange: Exchange) -> None:
        name = exchange.request.path.partition("/v1/models/")[2]
        card = models.model_card(name, self._serving(), self._started)
        exchange.respond(200, sse.encode(card))

    # ----------------------------------------------------------------------------- generating

    def completions(self, exchange: Exchange) -> None:
        resolved = self._serving()
        request = completions.decoder.decode(exchange.request.body, self._server().unknown_fields)
        name = fields.model_name(request.model, resolved)
        embeddings.check_generates(resolved)
        command = completions.generate(
            request, resolved, request_id=self._open.new_id(), arrival=exchange.received
        )
        form = completions.CompletionForm(request, name)
        self._generate(exchange, request, command, form, len(command.prompts))

    def chat(self, exchange: Exchange) -> None:
        resolved = self._serving()
        request = chat.decoder.decode(exchange.request.body, self._server().unknown_fields)
        name = fields.model_name(request.model, resolved)
        embeddings.check_generates(resolved)
        self._check_template(request.chat_template)
        command = chat.generate(
            request, resolved, request_id=self._open.new_id(), arrival=exchange.received
        )
        self._generate(exchange, request, command, chat.ChatForm(request, name), 1)

    def _generate(
        self,
        exchange: Exchange,
        request: fields.CommonFields,
        command: Generate,
        form: AnswerForm,
        num_prompts: int,
    ) -> None:
        """Send *command*, and have a Generation answer *exchange* with what comes back."""
        self._take_request_id(exchange, request.request_id)
        exchange.limit_time(fields.timeout(request))
        exchange.names = (form.id,)
        samples = command.params.n
        generation = Generation(
            exchange,
            form,
            num_choices=num_prompts * samples,
            samples=samples,
            stream=command.stream,
            options=fields.stream_options(request, self._server().unknown_fields),
            release=partial(self._open.release, command.request_id),
            cancel=partial(self._open.cancel, command.request_id),
        )
        self._submit(exchange, command.request_id, command, generation)

    def _check_template(self, given: str | None) -> None:
        """Refuse a client's own template, which may take seconds, unless clients are trusted."""
        if given is not None and not self._server().trust_request_chat_template:
            message = "chat_template is taken from requests only with --trust-request-chat-template"
            raise BadRequest(message, param="chat_template")

    def _submit(
        self,
        exchange: Exchange,
        request_id: int,
        command: Message,
        request: Generation | TokenizerCall,
    ) -> None:
        exchange.request.body = b""  # decoded: its memory is not needed while the answer is made
        try:
            self._open.submit(request_id, command, request)
        except (OverflowError, RecursionError):
            raise unfit(command, self._serving().spec.vocab_size) from None
        if isinstance(command, Generate | Pool):
            exchange.record.describe(command)
            self._counts.begun(exchange.record.num_sequences)

    @staticmethod
    def _take_request_id(exchange: Exchange, given: str | None) -> None:
        """Let the body's ``request_id`` name the request, where no header does."""
        if given and not exchange.request.header(b"x-request-id"):
            exchange.request_id = safe_request_id(given) or exchange.request_id

    # ----------------------------------------------------------------------------- tokenizing

    def tokenize(self, exchange: Exchange) -> None:
        resolved = self._serving()
        decoder = tokenize.tokenize_decoder
        request = decoder.decode(exchange.request.body, self._server().unknown_fields)
        fields.model_name(request.model, resolved)
        self._check_template(request.chat_template)
        request_id = self._open.new_id()
        command = tokenize.tokenize(request, request_id, strict=chat.is_strict(resolved))
        form = partial(tokenize.tokenize_answer, max_model_len=resolved.max_model_len)
        self._ask(exchange, request_id, command, form)

    def detokenize(self, exchange: Exchange) -> None:
        decoder = tokenize.detokenize_decoder
        request = decoder.decode(exchange.request.body, self._server().unknown_fields)
        fields.model_name(request.model, self._serving())
        request_id = self._open.new_id()
        command = tokenize.detokenize(request, request_id)
        self._ask(exchange, request_id, command, tokenize.detokenize_answer)

    def _pool(
        self,
        exchange: Exchange,
        request: embeddings.PoolingFields,
        command: Pool,
        form: Callable[[Any], dict[str, Any]],
    ) -> None:
        self._take_request_id(exchange, request.request_id)
        self._ask(exchange, command.request_id, command, form)

    def _ask(
        self,
        exchange: Exchange,
        request_id: int,
        command: Message,
        form: Callable[[Any], dict[str, Any]],
    ) -> None:
        call = TokenizerCall(
            exchange,
            form,
            release=partial(self._open.release, request_id),
            cancel=partial(self._open.cancel, request_id),
        )
        self._submit(exchange, request_id, command, call)
