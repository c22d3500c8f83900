"""The bodies that the server answers with, as types: what /openapi.json shows of them.

Answers are written as plain dicts, which is faster; tests hold every one of them against these
types, so that neither can change alone. ``UNSET`` marks keys that are there only when asked for.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class ErrorDetail(msgspec.Struct):
    """What went wrong, and in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not 2xx, and of the last event of a stream that fails."""

    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct):
    """Where the tokens of the prompts came from."""

    cached_tokens: int  # found in the prefix cache


class UsageBody(msgspec.Struct):
    """Tokens of one request: each prompt once, the outputs of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    """One candidate for a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null: the first position


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(msgspec.Struct):
    """One sample of one prompt: ``index`` is prompt * n + sample."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """A token with its log-probability and its bytes in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    """A token of the answer, and the likeliest tokens in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat choice, one entry a token."""

    content: list[ContentLogprob]
    refusal: None


class ChatChoice(msgspec.Struct):
    """One sample of the answer to a conversation."""

    index: int
    message: "AssistantMessage"
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None  # null where there are only thoughts or calls
    refusal: None
    reasoning_content: str | UnsetType = UNSET  # the thoughts, where the model marks them
    reasoning: str | UnsetType = UNSET  # the same
    tool_calls: list["ToolCallBody"] | UnsetType = UNSET


class CalledFunction(msgspec.Struct):
    """The function that is to be called."""

    name: str
    arguments: str  # JSON


class ToolCallBody(msgspec.Struct):
    """A call the model wants made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(msgspec.Struct):
    """A piece of a call's function: the name stands in the first one."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDeltaBody(msgspec.Struct):
    """A piece of a call: id and type stand in the first one."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What a chunk adds to the message; ``role`` stands in a choice's first one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDeltaBody] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """News of one choice of a stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelPermission(msgspec.Struct):
    """What may be done with a model; always the same, for clients that look."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelCard(msgspec.Struct):
    """A name that requests may give as ``model``."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["zlm"]
    root: str
    parent: str | None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct):
    """All served names."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct):
    """The token ids of a prompt or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class VersionAnswer(msgspec.Struct):
    """zlm's version."""

    version: str


class PoolingUsage(msgspec.Struct):
    """Tokens that vectors or scores were made of."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    system_fingerprint: str
    data: list[Embedding]
    usage: PoolingUsage


class PooledVector(msgspec.Struct):
    """What the model pools of one input: numbers, or base64 of little-endian float32.

    Where each token has a vector, a list of lists.
    """

    object: Literal["pooling"]
    index: int
    data: list[float | list[float]] | str


class PooledList(msgspec.Struct):
    """The answer of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    system_fingerprint: str
    data: list[PooledVector]
    usage: PoolingUsage


class Classification(msgspec.Struct):
    """The probabilities of all labels for one input, and the name of the likeliest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    """The answer of /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    system_fingerprint: str
    data: list[Classification]
    usage: PoolingUsage


class Score(msgspec.Struct):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(msgspec.Struct):
    """The answer of /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    system_fingerprint: str
    data: list[Score]
    usage: PoolingUsage


class RankedText(msgspec.Struct):
    """The text of a document."""

    text: str


class RankedDocument(msgspec.Struct):
    """A document's score; ``index`` is its place in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """The answer of /rerank: the best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage
