"""Log-probabilities of the raw distribution, as the columns that travel in messages.

Natural logs, always finite: what is impossible (or not a number) is reported as -9999.0. Knows
neither requests nor sampling parameters.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from zlm.messages import LogprobColumns

IMPOSSIBLE = -9999.0


def columns(raw: Tensor, tokens: Tensor, rows: Tensor, counts: Tensor, most: int) -> LogprobColumns:
    """Describe token ``tokens[k]`` under distribution ``raw[k]``.

    ``raw`` float32 [k, V]: log-softmax of unmodified logits, used up. ``tokens`` int64 [k].
    ``rows`` int64 [k]: what the column ``rows`` shall say. ``counts`` int64 [k]: entries of each
    token, itself included; ``most`` is the largest of them.
    """
    own, ranks, top_ids, top_values = describe(raw, tokens, most - 1)
    columns = (rows, counts, tokens, ranks, own, top_ids, top_values)
    return pack(*(column.cpu().numpy() for column in columns))


def describe(raw: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return *tokens*' values float32 [k] and ranks int64 [k], and the *most* likeliest ids.

    Those are int64 [k, most], with their values float32 [k, most], falling. ``raw`` is used up.
    Waits for no device.
    """
    raw = raw.nan_to_num_(nan=IMPOSSIBLE, posinf=IMPOSSIBLE, neginf=IMPOSSIBLE)
    raw = raw.clamp_(min=IMPOSSIBLE)
    own = raw.gather(1, tokens[:, None])
    ranks = (raw > own).sum(-1) + 1
    top_values, top_ids = raw.topk(most, dim=-1)
    return own.squeeze(1), ranks, top_ids, top_values


def pack(
    rows: np.ndarray,
    counts: np.ndarray,
    tokens: np.ndarray,
    ranks: np.ndarray,
    own: np.ndarray,
    top_ids: np.ndarray,
    top_values: np.ndarray,
) -> LogprobColumns:
    """Make columns of k tokens: all [k] but the alternatives, which are [k, at least most - 1].

    ``counts`` are the entries of each token, itself included; what a row has beyond is left out.
    """
    most = int(counts.max(initial=1))
    ids = np.concatenate((tokens[:, None], top_ids[:, : most - 1]), axis=1)
    values = np.concatenate((own[:, None], top_values[:, : most - 1]), axis=1)
    wanted = np.arange(most) < counts[:, None]
    return LogprobColumns(
        rows=_bytes(rows, np.int32),
        counts=_bytes(counts, np.int32),
        ranks=_bytes(ranks, np.int32),
        ids=_bytes(ids[wanted], np.int32),
        values=_bytes(values[wanted], np.float32),
    )


def join(pieces: Sequence[LogprobColumns]) -> LogprobColumns | None:
    """Put pieces one after another; None when there are none."""
    if not pieces:
        return None
    names = LogprobColumns.__struct_fields__
    return LogprobColumns(*(b"".join(getattr(p, name) for p in pieces) for name in names))


def _bytes(values: np.ndarray, kind: type) -> bytes:
    return values.astype(kind, copy=False).tobytes()
