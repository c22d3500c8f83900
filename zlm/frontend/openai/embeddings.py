"""POST /v1/embeddings and /pooling: the requests, and the form of their answers. Pure."""

import base64
from typing import Any

import msgspec
import numpy as np

from zlm.config import PoolingSpec, Resolved
from zlm.errors import BadRequest, clip
from zlm.frontend.openai import fields
from zlm.frontend.openai.answer import AnswerHead
from zlm.frontend.openai.body import BodyDecoder
from zlm.frontend.openai.chat import chat_prompt, is_strict
from zlm.messages import ChatPrompt, Pool, Pooled
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


class InputFields(PoolingFields, kw_only=True):
    """What is to be computed: texts or token ids, or (``messages``) one conversation."""

    input: Input | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # to inputs: yes; to a conversation: no
    prompt_name: str | None = None
    # Of a conversation.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(InputFields, kw_only=True):
    """The body of /v1/embeddings."""

    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """The body of /pooling."""

    task: str | None = None
    use_activation: bool | None = None


decoder = BodyDecoder(EmbeddingRequest)
pooling_decoder = BodyDecoder(PoolingRequest)


def embedding_params(request: EmbeddingRequest, resolved: Resolved) -> PoolingParams:
    """Return what /v1/embeddings does; raise BadRequest for what this model does not give."""
    check_vectors(resolved)
    _check_format(request)
    return PoolingParams(dimensions=request.dimensions, normalize=request.normalize, task="embed")


def pooling_params(request: PoolingRequest) -> PoolingParams:
    """Return what /pooling does: nothing to vectors that the request does not ask for."""
    _check_format(request)
    return PoolingParams(
        dimensions=request.dimensions,
        normalize=bool(request.normalize),
        activation=bool(request.use_activation),
        task=request.task,
    )


def pool(
    request: InputFields,
    params: PoolingParams,
    resolved: Resolved,
    *,
    request_id: int,
    arrival: float,
) -> Pool:
    """Return the command that pools the inputs of *request* as *params* says.

    ``truncate_prompt_tokens`` and ``prompt_name`` come from the request. Raises BadRequest.
    """
    params = msgspec.structs.replace(
        params,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        prompt_name=request.prompt_name,
    )
    params.check()
    prompts: list[str | list[int]] = []
    chat: ChatPrompt | None = None
    if request.messages is None:
        prompts = inputs_of(request.input, resolved.config.server.limits.max_prompts)
    elif request.input is not None:
        raise BadRequest("give either input or messages", param="input")
    else:
        chat = chat_prompt(request, strict=is_strict(resolved), begin_turn=False)
    return Pool(
        request_id=request_id,
        arrival=arrival,
        prompts=prompts,
        params=params,
        add_special_tokens=request.add_special_tokens is not False,
        priority=fields.priority(request.priority),
        chat=chat,
    )


def _check_format(request: EmbeddingRequest) -> None:
    if (request.encoding_format or "float") not in FORMATS:
        got = clip(request.encoding_format)
        raise BadRequest(
            f"encoding_format must be float or base64, got {got}", param="encoding_format"
        )


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
    """How vectors become the answer: floats, or base64 of little-endian float32.

    Where each token has a vector, an input has a list of them, or base64 of all, one after another.
    """

    def __init__(self, request: EmbeddingRequest, model: str, *, raw: bool) -> None:
        self._head = AnswerHead.new("pool" if raw else "embd", model)
        self._base64 = request.encoding_format == "base64"
        self._kind, self._key = ("pooling", "data") if raw else ("embedding", "embedding")

    def __call__(self, pooled: Pooled) -> dict[str, Any]:
        """Return the body of the answer."""
        data = [
            {"object": self._kind, "index": index, self._key: self._written(vector, rows)}
            for index, (vector, rows) in enumerate(zip(pooled.vectors, _rows(pooled), strict=True))
        ]
        return self._head.fields("list") | {"data": data, "usage": usage(pooled)}

    def _written(self, vector: bytes, rows: int) -> str | list[float] | list[list[float]]:
        if self._base64:
            return base64.b64encode(vector).decode()
        if not rows:
            return floats(vector)
        return np.frombuffer(vector, "<f4").reshape(rows, -1).tolist()


def _rows(pooled: Pooled) -> list[int]:
    """Return the number of vectors of each input; 0: one, which stands for the whole."""
    return [len(ids) if pooled.per_token else 0 for ids in pooled.prompts]


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
    """Raise BadRequest if this model has no vector of a whole input."""
    pooling = resolved.spec.pooling or PoolingSpec()
    problem = None
    if pooling.num_labels:
        instead = "/score or /rerank" if pooling.num_labels == 1 else "/classify"
        problem = f"scores or classifies, it gives no embeddings: use {instead}"
    if pooling.kind == "tokens":
        problem = "gives something for each token, and no embeddings of whole texts: use /pooling"
    if problem is not None:
        raise BadRequest(f"this model {problem}", param="model", code="model_not_supported")


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
