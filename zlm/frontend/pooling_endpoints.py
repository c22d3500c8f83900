"""The routes of models that give vectors or scores: from a whole request to a command and a form.

Knows the bodies; how a command is sent, and who answers, is ``endpoints``'.
"""

from collections.abc import Callable
from typing import Any, Protocol

from zlm.config import Resolved
from zlm.frontend.exchange import Exchange
from zlm.frontend.openai import classify, embeddings, scoring
from zlm.frontend.openai.embeddings import InputFields, PoolingFields
from zlm.frontend.routes import Handler
from zlm.messages import Pool
from zlm.scores import Pairs


class Ask(Protocol):
    """Sends a command whose one answer becomes the body."""

    def __call__(
        self,
        exchange: Exchange,
        request: PoolingFields,
        command: Pool,
        form: Callable[[Any], dict[str, Any]],
    ) -> None: ...


class PoolingEndpoints:
    """The handlers.

    *serving* gives the resolved configuration, *new_id* an id for a request; *check_template*
    refuses a chat template that a client brings, if that is not allowed.
    """

    def __init__(
        self,
        serving: Callable[[], Resolved],
        new_id: Callable[[], int],
        ask: Ask,
        check_template: Callable[[str | None], None],
    ) -> None:
        self._serving = serving
        self._new_id = new_id
        self._ask = ask
        self._check_template = check_template

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of each path that takes POST."""
        return {
            "/v1/embeddings": self.embeddings,
            "/pooling": self.pooling,
            "/classify": self.classify,
            "/score": self.score,
            "/v1/score": self.score,
            "/rerank": self.rerank,
            "/v1/rerank": self.rerank,
            "/v2/rerank": self.rerank,
        }

    def embeddings(self, exchange: Exchange) -> None:
        resolved = self._serving()
        request = embeddings.decoder.decode(exchange.request.body, _unknown_fields(resolved))
        name = self._model_of(request, resolved)
        embeddings.check_vectors(resolved)
        command = embeddings.embed(
            request, resolved, request_id=self._new_id(), arrival=exchange.received
        )
        self._ask(exchange, request, command, embeddings.EmbeddingForm(request, name, raw=False))

    def pooling(self, exchange: Exchange) -> None:
        resolved = self._serving()
        decoder = embeddings.pooling_decoder
        request = decoder.decode(exchange.request.body, _unknown_fields(resolved))
        name = self._model_of(request, resolved)
        command = embeddings.pool_raw(
            request, resolved, request_id=self._new_id(), arrival=exchange.received
        )
        self._ask(exchange, request, command, embeddings.EmbeddingForm(request, name, raw=True))

    def classify(self, exchange: Exchange) -> None:
        resolved = self._serving()
        request = classify.decoder.decode(exchange.request.body, _unknown_fields(resolved))
        name = self._model_of(request, resolved)
        command = classify.classify(
            request, resolved, request_id=self._new_id(), arrival=exchange.received
        )
        self._ask(exchange, request, command, classify.ClassifyForm(resolved, name))

    def score(self, exchange: Exchange) -> None:
        resolved = self._serving()
        server = resolved.config.server
        request = scoring.score_decoder.decode(exchange.request.body, server.unknown_fields)
        name = embeddings.model_of(request, resolved)
        pairs = scoring.score_pairs(request, server.limits.max_prompts)
        form = scoring.ScoreForm(pairs, name, is_cross_encoder=_scores(resolved))
        self._ask(exchange, request, self._pairs(exchange, request, pairs), form)

    def rerank(self, exchange: Exchange) -> None:
        resolved = self._serving()
        server = resolved.config.server
        request = scoring.rerank_decoder.decode(exchange.request.body, server.unknown_fields)
        name = embeddings.model_of(request, resolved)
        pairs = scoring.rerank_pairs(request, server.limits.max_prompts)
        form = scoring.RerankForm(request, pairs, name, is_cross_encoder=_scores(resolved))
        self._ask(exchange, request, self._pairs(exchange, request, pairs), form)

    def _model_of(self, request: InputFields, resolved: Resolved) -> str:
        """Return the name to answer with; raises for what is not served here."""
        name = embeddings.model_of(request, resolved)
        self._check_template(request.chat_template)
        return name

    def _pairs(self, exchange: Exchange, request: PoolingFields, pairs: Pairs) -> Pool:
        return scoring.pool(
            request,
            pairs,
            self._serving(),
            request_id=self._new_id(),
            arrival=exchange.received,
        )


def _unknown_fields(resolved: Resolved) -> str:
    return resolved.config.server.unknown_fields


def _scores(resolved: Resolved) -> bool:
    """Whether the model reads pairs and scores them itself."""
    pooling = resolved.spec.pooling
    return pooling is not None and pooling.num_labels > 0
