"""POST /score and /rerank: the requests, and the forms of their answers. Pure."""

from typing import Any

import msgspec

from zlm.config import PoolingSpec, Resolved
from zlm.errors import BadRequest
from zlm.frontend.openai import fields
from zlm.frontend.openai.answer import AnswerHead
from zlm.frontend.openai.body import BodyDecoder
from zlm.frontend.openai.embeddings import PoolingFields, usage
from zlm.messages import Pool, Pooled
from zlm.pooling_params import PoolingParams
from zlm.scores import Pairs, pooled_texts, scores

Texts = str | list[str]


class ScoreRequest(PoolingFields, kw_only=True):
    """The body of /score: one text against several, or as many against as many."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    # Newer names of the two.
    queries: Texts | None = None
    documents: Texts | None = None


class DocumentText(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """The body of /rerank, as Jina and Cohere have it."""

    query: str | None = None
    documents: list[str | DocumentText] | None = None
    top_n: int | None = None
    return_documents: bool | None = None


score_decoder = BodyDecoder(ScoreRequest)
rerank_decoder = BodyDecoder(RerankRequest)


def score_pairs(request: ScoreRequest, most: int) -> Pairs:
    """Return the texts of *request*; raise BadRequest, naming the field, if they do not match."""
    first, firsts = _texts("text_1", request.text_1, "queries", request.queries, most)
    second, seconds = _texts("text_2", request.text_2, "documents", request.documents, most)
    if len(firsts) not in (1, len(seconds)):
        raise BadRequest(
            f"{first} has {len(firsts)} texts and {second} {len(seconds)}: give one {first} for "
            "all, or as many",
            param=first,
        )
    return Pairs(firsts, seconds, (first, second))


def rerank_pairs(request: RerankRequest, most: int) -> Pairs:
    """Return the query and the documents' texts of *request*, checked."""
    if request.query is None:
        raise BadRequest("query is required", param="query")
    if not request.documents:
        raise BadRequest("documents must be a list of at least one text", param="documents")
    if len(request.documents) > most:
        count = len(request.documents)
        message = f"documents has {count} texts, the limit is {most}"
        raise BadRequest(message, param="documents")
    if request.top_n is not None and request.top_n < 0:
        raise BadRequest(f"top_n must not be negative, got {request.top_n}", param="top_n")
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    return Pairs([request.query], texts, ("query", "documents"))


def pool(
    request: PoolingFields, pairs: Pairs, resolved: Resolved, *, request_id: int, arrival: float
) -> Pool:
    """Return the command for the tokenizer that gives what scores are made of."""
    pooling = resolved.spec.pooling or PoolingSpec()
    params = PoolingParams(truncate_prompt_tokens=request.truncate_prompt_tokens)
    params.check()
    texts = pooled_texts(pairs, pooling)
    return Pool(
        request_id=request_id,
        arrival=arrival,
        prompts=texts.prompts,
        params=params,
        seconds=texts.seconds,
        priority=fields.priority(request.priority),
        names=texts.names,
    )


class ScoreForm:
    """How scores become the answer to /score."""

    def __init__(self, pairs: Pairs, model: str, *, is_cross_encoder: bool) -> None:
        self._head = AnswerHead.new("score", model)
        self._num_pairs = len(pairs.seconds)
        self._is_cross_encoder = is_cross_encoder

    def __call__(self, pooled: Pooled) -> dict[str, Any]:
        """Return the body of the answer."""
        found = _scores(pooled, self._num_pairs, self._is_cross_encoder)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(found)]
        return self._head.fields("list") | {"data": data, "usage": usage(pooled)}


class RerankForm:
    """How scores become the answer to /rerank: the best document first."""

    def __init__(
        self, request: RerankRequest, pairs: Pairs, model: str, *, is_cross_encoder: bool
    ) -> None:
        self._head = AnswerHead.new("rerank", model)
        self._texts = pairs.seconds
        self._most = request.top_n or len(pairs.seconds)
        self._with_documents = request.return_documents is not False
        self._is_cross_encoder = is_cross_encoder

    def __call__(self, pooled: Pooled) -> dict[str, Any]:
        """Return the body of the answer."""
        found = _scores(pooled, len(self._texts), self._is_cross_encoder)
        order = sorted(range(len(found)), key=lambda i: (-found[i], i))[: self._most]
        results: list[dict[str, Any]] = [
            {"index": i, "relevance_score": found[i]}
            | ({"document": {"text": self._texts[i]}} if self._with_documents else {})
            for i in order
        ]
        head = self._head
        return {"id": head.id, "model": head.model, "results": results, "usage": usage(pooled)}


def _scores(pooled: Pooled, num_pairs: int, is_cross_encoder: bool) -> list[float]:
    lengths = [len(prompt) for prompt in pooled.prompts] if pooled.per_token else None
    return scores(pooled.vectors, num_pairs, is_cross_encoder=is_cross_encoder, lengths=lengths)


def _texts(
    name: str, given: Texts | None, other_name: str, other: Texts | None, most: int
) -> tuple[str, list[str]]:
    """Return the name that was used, and the texts."""
    if given is not None and other is not None:
        raise BadRequest(f"give {name} or {other_name}, not both", param=other_name)
    found = given if given is not None else other
    if found is None:
        raise BadRequest(f"{name} is required", param=name)
    name = other_name if given is None else name
    texts = [found] if isinstance(found, str) else found
    if not texts:
        raise BadRequest(f"{name} must not be an empty list", param=name)
    if len(texts) > most:
        raise BadRequest(f"{name} has {len(texts)} texts, the limit is {most}", param=name)
    return name, texts
