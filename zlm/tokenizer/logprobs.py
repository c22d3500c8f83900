"""From the engine's columns of log-probabilities to entries with token texts."""

from collections.abc import Sequence

import numpy as np

from zlm.messages import LogprobColumns, TokenLogprob
from zlm.tokenizer.detokenize import detokenizer
from zlm.tokenizer.token_table import TokenTable

LOWEST = -9999.0  # stands for impossible: JSON has no infinity


def entries_by_row(columns: LogprobColumns, table: TokenTable) -> dict[int, list[TokenLogprob]]:
    """Return the entries of each row of a step, in order; several for a prompt's tokens."""
    rows = np.frombuffer(columns.rows, dtype="<i4").tolist()
    counts = np.frombuffer(columns.counts, dtype="<i4").tolist()
    ranks = np.frombuffer(columns.ranks, dtype="<i4").tolist()
    ids = np.frombuffer(columns.ids, dtype="<i4").tolist()
    raw_values = np.frombuffer(columns.values, dtype="<f4").astype(np.float64)
    values = np.clip(np.nan_to_num(raw_values, nan=LOWEST), LOWEST, 0.0).tolist()
    found: dict[int, list[TokenLogprob]] = {}
    at = 0
    for row, count, rank in zip(rows, counts, ranks, strict=True):
        end = at + count
        top = [
            (token_id, table.name(token_id), table.shown_bytes(token_id), value)
            for token_id, value in zip(ids[at + 1 : end], values[at + 1 : end], strict=True)
        ]
        found.setdefault(row, []).append(entry(table, ids[at], values[at], top, rank))
        at = end
    return found


def entry(
    table: TokenTable,
    token_id: int,
    logprob: float | None,
    top: list[tuple[int, str, bytes, float]],
    rank: int = 0,
) -> TokenLogprob:
    """Return the entry of one token; *logprob* None for a prompt's first."""
    return TokenLogprob(
        token_id, table.name(token_id), table.shown_bytes(token_id), logprob, top, rank
    )


def text_offsets(
    table: TokenTable, token_ids: Sequence[int], text: str, *, skip: bool
) -> list[int]:
    """Return how many characters of a prompt's *text* stand before each of its tokens.

    *skip*: special tokens are not in it, unless they were typed. Where it still is not what the
    tokens make, a BOS was put before it, or its first space is none of its own.
    """
    offsets: list[int] = []
    end = -1
    for hides in (True, False) if skip else (False,):
        if end == len(text):
            break
        shown = detokenizer(table, skip_special_tokens=hides)
        offsets, end = [], 0
        for token_id in token_ids:
            offsets.append(end + shown.whole_held)
            end += len(shown.push(token_id))
        end += len(shown.flush())
    surplus = end - len(text)
    return [min(max(offset - surplus, 0), len(text)) for offset in offsets]


def with_top(entries: Sequence[TokenLogprob], count: int) -> list[TokenLogprob]:
    """Return *entries* with at most *count* alternatives each."""
    return [
        e
        if len(e.top) <= count
        else TokenLogprob(e.token_id, e.token, e.token_bytes, e.logprob, e.top[:count], e.rank)
        for e in entries
    ]
