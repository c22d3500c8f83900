"""The routes of models that give vectors or scores: from a whole request to a command and a form.

Knows the bodies; how a command is sent, and who answers, is ``endpoints``'.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from zlm.config import Resolved
from zlm.frontend.exchange import Exchange
from zlm.frontend.openai import classify, embeddings, scoring
from zlm.frontend.openai.body import BodyDecoder
from zlm.frontend.openai.embeddings import InputFields, PoolingFields
from zlm.frontend.routes import Handler
from zlm.messages import Pool, Pooled

Form = Callable[[Pooled], dict[str, Any]]  # makes the body of the answer
Body = TypeVar("Body", bound=PoolingFields)


class PoolingEndpoints:
    """The handlers.

    *serving* gives the resolved configuration, *new_id* an id for a request; *ask* sends a command
    whose one answer becomes the body; *check_template* refuses a chat template that a client
    brings, if that is not allowed.
    """

    def __init__(
        self,
        serving: Callable[[], Resolved],
        new_id: Callable[[], int],
        ask: Callable[[Exchange, PoolingFields, Pool, Form], None],
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
        request, resolved, name = self._read(exchange, embeddings.decoder)
        params = embeddings.embedding_params(request, resolved)
        make = partial(embeddings.pool, request, params, resolved)
        self._send(exchange, request, make, embeddings.EmbeddingForm(request, name, raw=False))

    def pooling(self, exchange: Exchange) -> None:
        request, resolved, name = self._read(exchange, embeddings.pooling_decoder)
        make = partial(embeddings.pool, request, embeddings.pooling_params(request), resolved)
        self._send(exchange, request, make, embeddings.EmbeddingForm(request, name, raw=True))

    def classify(self, exchange: Exchange) -> None:
        request, resolved, name = self._read(exchange, classify.decoder)
        params = classify.classify_params(request, resolved)
        make = partial(embeddings.pool, request, params, resolved)
        self._send(exchange, request, make, classify.ClassifyForm(resolved, name))

    def score(self, exchange: Exchange) -> None:
        request, resolved, name = self._read(exchange, scoring.score_decoder)
        pairs = scoring.score_pairs(request, resolved.config.server.limits.max_prompts)
        form = scoring.ScoreForm(pairs, name, is_cross_encoder=_scores(resolved))
        self._send(exchange, request, partial(scoring.pool, request, pairs, resolved), form)

    def rerank(self, exchange: Exchange) -> None:
        request, resolved, name = self._read(exchange, scoring.rerank_decoder)
        pairs = scoring.rerank_pairs(request, resolved.config.server.limits.max_prompts)
        form = scoring.RerankForm(request, pairs, name, is_cross_encoder=_scores(resolved))
        self._send(exchange, request, partial(scoring.pool, request, pairs, resolved), form)

    def _read(self, exchange: Exchange, decoder: BodyDecoder[Body]) -> tuple[Body, Resolved, str]:
        """Return the body, what is served, and the name to answer with.

        Raises for a name, a kind of model or a template that is not served here.
        """
        resolved = self._serving()
        request = decoder.decode(exchange.request.body, resolved.config.server.unknown_fields)
        name = embeddings.model_of(request, resolved)
        if isinstance(request, InputFields):
            self._check_template(request.chat_template)
        return request, resolved, name

    def _send(
        self, exchange: Exchange, request: PoolingFields, make: Callable[..., Pool], form: Form
    ) -> None:
        command = make(request_id=self._new_id(), arrival=exchange.received)
        self._ask(exchange, request, command, form)


def _scores(resolved: Resolved) -> bool:
    """Whether the model reads pairs and scores them itself."""
    pooling = resolved.spec.pooling
    return pooling is not None and pooling.num_labels > 0
