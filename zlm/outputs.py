"""What the offline interface returns, in vLLM's shapes and names.

Plain values: they hold no handle on the engine and stay valid after it has gone. Imports nothing
of zlm.
"""

import msgspec


class Logprob(msgspec.Struct):
    """One candidate token: natural log of its raw probability, and its text."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest token
    decoded_token: str | None = None


# One position: the token that stands there (first), and the likeliest alternatives.
PositionLogprobs = dict[int, Logprob]


class CompletionOutput(msgspec.Struct):
    """One sample of one prompt.

    ``finish_reason``: stop, length, abort, or error (then ``text`` is empty and the request's
    ``error`` says why). ``logprobs`` has one entry a token of ``token_ids`` when it was asked for,
    and ``cumulative_logprob`` is the sum over those tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string or stop id that ended it

    def finished(self) -> bool:
        """Say whether this sample is over."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """One prompt with its samples, in the order the prompts were given.

    ``prompt`` is the text that was given, or what the chat template made of the conversation;
    None when ids were given. ``prompt_logprobs`` has one entry a prompt token, None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str | None = None  # why the engine could not finish this request, if it could not


class BeamSearchSequence(msgspec.Struct):
    """One output that beam search found.

    ``tokens`` and ``text`` are the prompt and the output, as in vLLM; ``logprobs`` and
    ``cum_logprob`` are of the output alone, with the EOS token that ended it. ``score`` is what
    outputs are compared by: ``cum_logprob`` after the length penalty.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct):
    """What beam search found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


class EmbeddingOutput(msgspec.Struct):
    """The vector of one input."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its number of elements."""
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct):
    """The probability of each label of a classifier, and the labels' names."""

    probs: list[float]
    labels: list[str]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


class ScoringOutput(msgspec.Struct):
    """How well two texts go together."""

    score: float


class PoolingOutput(msgspec.Struct):
    """A vector as it was pooled: after the model's dense layers, before anything else.

    Of the tasks token_embed and token_classify: one for each token, in order.
    """

    data: list[float] | list[list[float]]


class EmbeddingRequestOutput(msgspec.Struct):
    """One input with its vector, in the order the inputs were given."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


class ClassificationRequestOutput(msgspec.Struct):
    """One input with its labels' probabilities, in the order the inputs were given."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = True


class ScoringRequestOutput(msgspec.Struct):
    """One pair with its score. ``prompt_token_ids``: what was computed for it."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


class PoolingRequestOutput(msgspec.Struct):
    """One input with its pooled vector, in the order the inputs were given."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
