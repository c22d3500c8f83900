"""POST /v1/embeddings and /pooling: the requests, and the forms of their answers. Pure."""

import base64
from typing import Any

import msgspec
import numpy as np

from zlm.config import Resolved
from zlm.errors import BadRequest, clip
from zlm.frontend.openai import fields
from zlm.frontend.openai.answer import AnswerHead
from zlm.frontend.openai.body import BodyDecoder
from zlm.messages import Pool, Pooled
from zlm.pooling_params import PoolingParams

FORMATS = ("float", "base64")
Input = str | list[str | int | list[int]]


class PoolingFields(msgspec.Struct, kw_only=True):
    """What all endpoints for vectors and scores take."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    request_id: str | None = None
    # Accepted, changes nothing here.
    user: str | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """The body of /v1/embeddings and /pooling."""

    input: Input | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class StrictEmbeddingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """The same, and nothing else."""


decoder = BodyDecoder(EmbeddingRequest, StrictEmbeddingRequest)


def pool(
    request: EmbeddingRequest, resolved: Resolved, *, request_id: int, arrival: float, raw: bool
) -> Pool:
    """Return the command for the tokenizer; raise BadRequest for what cannot be done.

    raw: nothing is done to the vectors unless the request asks for it (/pooling).
    """
    if (request.encoding_format or "float") not in FORMATS:
        got = clip(request.encoding_format)
        raise BadRequest(
            f"encoding_format must be float or base64, got {got}", param="encoding_format"
        )
    normalize = request.normalize
    params = PoolingParams(
        dimensions=request.dimensions,
        normalize=False if raw and normalize is None else normalize,
        activation=False if raw else None,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        prompt_name=request.prompt_name,
    )
    params.check()
    return Pool(
        request_id=request_id,
        arrival=arrival,
        prompts=inputs_of(request.input, resolved.config.server.limits.max_prompts),
        params=params,
        add_special_tokens=request.add_special_tokens is not False,
        priority=priority(request),
    )


def priority(request: PoolingFields) -> int:
    """Return the priority, checked to be a signed 64-bit integer."""
    value = request.priority or 0
    if not -(2**63) <= value < 2**63:
        raise BadRequest("priority must be a signed 64-bit integer", param="priority")
    return value


def inputs_of(given: Input | None, most: int) -> list[str | list[int]]:
    """Return *given*, in any of its four shapes, as a list of inputs."""
    if given is None:
        raise BadRequest("input is required", param="input")
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if not given or (kinds == {list} and not all(given)):
        raise BadRequest("input must not be an empty list", param="input")
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if len(kinds) > 1:
        message = "input must be a string, a list of strings, of token ids, or of lists of them"
        raise BadRequest(f"{message}, not a mixture", param="input")
    if len(given) > most:
        raise BadRequest(f"input has {len(given)} inputs, the limit is {most}", param="input")
    return given  # type: ignore[return-value]


class EmbeddingForm:
    """How vectors become the answer: floats, or base64 of little-endian float32."""

    def __init__(self, request: EmbeddingRequest, model: str, *, raw: bool) -> None:
        self._head = AnswerHead.new("pool" if raw else "embd", model)
        self._base64 = request.encoding_format == "base64"
        self._kind, self._key = ("pooling", "data") if raw else ("embedding", "embedding")

    def __call__(self, pooled: Pooled) -> dict[str, Any]:
        """Return the body of the answer."""
        data = [
            {"object": self._kind, "index": index, self._key: self._written(vector)}
            for index, vector in enumerate(pooled.vectors)
        ]
        return self._head.fields("list") | {"data": data, "usage": usage(pooled)}

    def _written(self, vector: bytes) -> str | list[float]:
        if self._base64:
            return base64.b64encode(vector).decode()
        return floats(vector)


def floats(vector: bytes) -> list[float]:
    """Return the elements of a vector."""
    return np.frombuffer(vector, "<f4").tolist()


def usage(pooled: Pooled) -> dict[str, int]:
    """Return the ``usage`` object: the tokens that vectors were made of."""
    count = sum(map(len, pooled.prompts))
    return {"prompt_tokens": count, "total_tokens": count}


def check_served(resolved: Resolved) -> None:
    """Raise BadRequest unless this model gives vectors or scores."""
    if resolved.spec.pooling is None:
        raise BadRequest(
            "this model generates text: it gives no embeddings or scores. Start the server with "
            "--runner pooling to make an embedding model of it",
            param="model",
            code="model_not_supported",
        )


def check_vectors(resolved: Resolved) -> None:
    """Raise BadRequest if this model scores, and gives no vectors."""
    if resolved.spec.pooling is not None and resolved.spec.pooling.num_labels:
        raise BadRequest(
            "this model scores or classifies, it gives no embeddings: use /score or /rerank",
            param="model",
            code="model_not_supported",
        )


def check_generates(resolved: Resolved) -> None:
    """Raise BadRequest unless this model generates text."""
    pooling = resolved.spec.pooling
    if pooling is not None:
        instead = "/score or /rerank" if pooling.num_labels else "/v1/embeddings"
        raise BadRequest(
            f"this model gives embeddings or scores and generates no text: use {instead}",
            param="model",
            code="model_not_supported",
        )


def model_of(request: PoolingFields, resolved: Resolved) -> str:
    """Return the name to answer with; raises for a name, or a kind of model, not served here."""
    name = fields.model_name(request.model, resolved)
    check_served(resolved)
    return name
