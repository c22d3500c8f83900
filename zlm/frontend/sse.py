"""Server-sent events: frames as bytes, most of each made once a stream.

A frame that carries nothing but text is the text, JSON-escaped, between two byte strings that stay
the same for a choice of a stream. Pure: knows no socket.
"""

from typing import Any

import msgspec

from zlm.messages import Delta
from zlm.tokenizer.output_parts import joined_calls

DONE = b"data: [DONE]\n\n"
PLACE = "\x00"  # where the text goes in the payload a template is made from
_PLACE_JSON = b'"\\u0000"'

encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """Return one frame with *payload* as JSON."""
    return b"data: %b\n\n" % encode(payload)


def template(payload: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the bytes of *payload*'s frame before and after the last ``PLACE`` in it."""
    before, place, after = event(payload).rpartition(_PLACE_JSON)
    assert place, "the payload has no place for the text"
    return before, after


def is_plain(delta: Delta) -> bool:
    """Return whether *delta* carries nothing but text."""
    return (
        delta.finish_reason is None
        and delta.logprobs is None
        and delta.token_ids is None
        and delta.prompt_token_ids is None
        and delta.prompt_logprobs is None
        and not delta.reasoning
        and not delta.tool_calls
    )


def merge(deltas: list[Delta]) -> list[Delta]:
    """Join the deltas of each choice into one, in the order of the choices' first ones."""
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [_join(parts) if len(parts) > 1 else parts[0] for parts in by_choice.values()]


def _join(parts: list[Delta]) -> Delta:
    first, last = parts[0], parts[-1]
    return msgspec.structs.replace(
        last,
        text="".join([part.text for part in parts]),
        token_ids=_concatenate([part.token_ids for part in parts]),
        logprobs=_concatenate([part.logprobs for part in parts]),
        text_offsets=[offset for part in parts for offset in part.text_offsets],
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        reasoning="".join([part.reasoning for part in parts]),
        tool_calls=joined_calls([call for part in parts for call in part.tool_calls]),
    )


def _concatenate(lists: list[list[Any] | None]) -> list[Any] | None:
    """Return the lists joined; None if all are."""
    given = [values for values in lists if values is not None]
    if not given:
        return None
    return [value for values in given for value in values]
