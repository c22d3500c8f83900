"""Log-probabilities in the shapes of the two endpoints. Pure.

A value no probability stands behind is -9999.0, as OpenAI writes it: no infinity leaves.
"""

from typing import Any

from zlm.messages import TokenLogprob

IMPOSSIBLE = -9999.0


def finite(value: float) -> float:
    """Return *value*, or -9999.0 if it is lower than that or no number."""
    return value if value > IMPOSSIBLE else IMPOSSIBLE


def shown(entry: TokenLogprob | tuple[int, str, bytes, float], as_ids: bool) -> str:
    """Return a token's text, or ``token_id:N`` for clients that ask for ids."""
    token_id, token = (
        (entry.token_id, entry.token) if isinstance(entry, TokenLogprob) else entry[:2]
    )
    return f"token_id:{token_id}" if as_ids else token


def completion_shape(
    entries: list[TokenLogprob], *, alternatives: int, offsets: list[int], as_ids: bool
) -> dict[str, Any]:
    """Return the ``logprobs`` object of a completion.

    *offsets*: of each token, in characters from the start of the returned text.
    With *alternatives* 0 there is no ``top_logprobs``; else each entry also holds the token itself.
    """
    top: list[dict[str, float] | None] | None = None
    if alternatives:
        top = [_by_text(entry, as_ids) for entry in entries]
    logprobs = [entry.logprob for entry in entries]
    return {
        "text_offset": offsets,
        "token_logprobs": [None if value is None else finite(value) for value in logprobs],
        "tokens": [shown(entry, as_ids) for entry in entries],
        "top_logprobs": top,
    }


def _by_text(entry: TokenLogprob, as_ids: bool) -> dict[str, float] | None:
    """Return text → logprob of the likeliest and the token itself; None for a first prompt token.

    Of several tokens with one text (parts of a character) the likeliest is shown.
    """
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for candidate in entry.top:
        found.setdefault(shown(candidate, as_ids), finite(candidate[3]))
    found.setdefault(shown(entry, as_ids), finite(entry.logprob))
    return found


def chat_shape(entries: list[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice."""
    content = [
        {
            "token": shown(entry, as_ids),
            "logprob": finite(IMPOSSIBLE if entry.logprob is None else entry.logprob),
            "bytes": list(entry.token_bytes),
            "top_logprobs": [
                {
                    "token": shown(candidate, as_ids),
                    "logprob": finite(candidate[3]),
                    "bytes": list(candidate[2]),
                }
                for candidate in entry.top
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_shape(entries: list[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Return ``prompt_logprobs``: id → {logprob, rank, decoded_token}; null for the first token."""
    return [_by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprob) -> dict[str, Any] | None:
    if entry.logprob is None:
        return None
    found = {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": token}
        for rank, (token_id, token, _, logprob) in enumerate(entry.top, start=1)
    }
    if str(entry.token_id) not in found:
        found[str(entry.token_id)] = {
            "logprob": finite(entry.logprob),
            "rank": entry.rank or None,
            "decoded_token": entry.token,
        }
    return found
