"""Whether a prompt and its output fit: the context length, and what the KV cache can ever hold.

Pure: numbers in, a number of tokens or an error out.
"""

from zlm.errors import BadRequest, TooLong


def output_tokens(
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    max_model_len: int,
    max_sequence_tokens: int | None,
    min_tokens: int = 0,
    default: int | None = None,
    clamp: bool = False,
    param: str = "prompt",
    max_field: str = "max_tokens",
) -> int:
    """Return how many tokens may be generated after a prompt of *num_prompt_tokens*.

    *max_tokens* None means as many as there is room for, at most *default*. With *clamp* a larger
    *max_tokens* than the room is lowered to it. Raises BadRequest for an empty prompt, TooLong,
    with both numbers, for what does not fit; *param* and *max_field* name the
    fields of the prompt and of *max_tokens*.
    """
    if num_prompt_tokens == 0:
        raise BadRequest(f"{param} must not be empty: it has no tokens", param=param)
    check_prompt(num_prompt_tokens, max_model_len, generate=max_tokens != 0, param=param)
    if max_tokens == 0:
        _check_cache(num_prompt_tokens, max_sequence_tokens, param)
        return 0
    room = max_model_len - num_prompt_tokens
    if max_tokens is not None and max_tokens > room and not clamp:
        raise TooLong(
            f"{param} has {num_prompt_tokens} tokens and {max_field} is {max_tokens}, together "
            f"{num_prompt_tokens + max_tokens}; {context_length(max_model_len)}",
            param=max_field,
        )
    wanted = room if max_tokens is None else min(max_tokens, room)
    if max_tokens is None and default is not None:
        wanted = min(wanted, max(default, 1))
    if max_sequence_tokens is not None:
        _check_cache(num_prompt_tokens + 1, max_sequence_tokens, param)
        if max_tokens is None or clamp:
            wanted = min(wanted, max_sequence_tokens - num_prompt_tokens)
        _check_cache(num_prompt_tokens + wanted, max_sequence_tokens, param)
    if min_tokens > wanted:
        raise BadRequest(
            f"min_tokens is {min_tokens}, but there is room for only {wanted} tokens after {param}",
            param="min_tokens",
        )
    return wanted


def check_prompt(
    num_prompt_tokens: int,
    max_model_len: int,
    *,
    generate: bool = True,
    at_least: bool = False,
    param: str = "prompt",
    what: str | None = None,
) -> None:
    """Raise TooLong if the prompt alone fills the context, or (not *generate*) exceeds it.

    *at_least* says that the number is a lower bound. *what* has the tokens, if not *param* alone.
    """
    limit = max_model_len - 1 if generate else max_model_len
    if num_prompt_tokens <= limit:
        return
    count = f"at least {num_prompt_tokens}" if at_least else str(num_prompt_tokens)
    reason = ", which leaves no room to generate" if num_prompt_tokens == max_model_len else ""
    raise TooLong(
        f"{what or param} has {count} tokens, {context_length(max_model_len)}{reason}",
        param=param,
    )


def context_length(max_model_len: int) -> str:
    """Say the limit in OpenAI's words: clients know this error by them (LiteLLM's fallbacks do)."""
    return f"this model's maximum context length is {max_model_len} tokens"


def _check_cache(tokens: int, max_sequence_tokens: int | None, param: str) -> None:
    if max_sequence_tokens is not None and tokens > max_sequence_tokens:
        raise TooLong(
            f"{param} and its output need {tokens} tokens, the KV cache can hold "
            f"{max_sequence_tokens} tokens of one sequence",
            param=param,
        )
