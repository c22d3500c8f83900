"""Prompts in every form that ``LLM`` takes, checked; one conversation or several. Pure."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from zlm.errors import BadRequest, clip

# A text, ids, {"prompt": text}, or {"prompt_token_ids": ids}; the last two with "cache_salt" too.
Prompt = str | Sequence[int] | Mapping[str, Any]
ChatMessage = dict[str, Any]
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, or several, of any form as a list of them; so too what is no prompt."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(hasattr(item, "__index__") for item in items):
        return [items]  # one prompt, as ids
    return items


def prompt_parts(index: int, prompt: Prompt) -> tuple[str | None, list[int] | None, str]:
    """Return (text, ids, cache_salt) of a prompt of any form; ids win where both are given."""
    if isinstance(prompt, str):
        return prompt, None, ""
    if not isinstance(prompt, Mapping):
        return None, _ids(index, prompt), ""
    for key in prompt.keys() - PROMPT_KEYS:
        known = ", ".join(sorted(PROMPT_KEYS))
        raise BadRequest(f"prompt {index}: unknown key {key!r}; known are {known}", param=str(key))
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise BadRequest(f"prompt {index}: 'prompt' must be a string", param="prompt")
    if text is None and ids is None:
        message = f"prompt {index}: neither 'prompt' nor 'prompt_token_ids' is given"
        raise BadRequest(message, param="prompt")
    return text, None if ids is None else _ids(index, ids), str(prompt.get("cache_salt") or "")


def _ids(index: int, ids: Any) -> list[int]:
    if not isinstance(ids, bytes):
        with suppress(TypeError):
            return list(map(operator.index, ids))
    message = f"prompt {index}: must be a string, a dict, or a list of token ids"
    raise BadRequest(f"{message}, got {clip(repr(ids))}", param="prompts")


def conversations(messages: Any) -> list[Any]:
    """Return one conversation (a list of messages), or several, as a list of them."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        return [messages]
    given = list(messages)
    return [given] if given and isinstance(given[0], Mapping) else given
