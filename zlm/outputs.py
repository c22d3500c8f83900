"""What the offline interface returns, in vLLM's shapes and names."""

import msgspec


class Logprob(msgspec.Struct):
    """One candidate token: natural log of its raw probability, and its text."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest; known for the sampled token
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One sample of one prompt. ``finish_reason``: stop, length or abort, None while running."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct):
    """One prompt with its samples, in the order the prompts were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
