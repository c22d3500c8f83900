"""Log-probabilities of the raw distribution, as the columns that travel in messages.

Natural logs, always finite: what is impossible (or not a number) is reported as -9999.0. Knows
neither requests nor sampling parameters.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zlm.messages import LogprobColumns

IMPOSSIBLE = -9999.0


def columns(raw: Tensor, tokens: Tensor, rows: Tensor, counts: Tensor, most: int) -> LogprobColumns:
    """Describe token ``tokens[k]`` under distribution ``raw[k]``.

    ``raw`` float32 [k, V]: log-softmax of unmodified logits, used up. ``tokens`` int64 [k].
    ``rows`` int64 [k]: what the column ``rows`` shall say. ``counts`` int64 [k]: entries of each
    token, itself included; ``most`` is the largest of them.
    """
    raw = raw.nan_to_num_(nan=IMPOSSIBLE, posinf=IMPOSSIBLE, neginf=IMPOSSIBLE)
    raw = raw.clamp_(min=IMPOSSIBLE)
    own = raw.gather(1, tokens[:, None])
    ranks = (raw > own).sum(-1) + 1
    ids, values = tokens[:, None], own
    if most > 1:
        top_values, top_ids = raw.topk(most - 1, dim=-1)
        ids, values = torch.cat((ids, top_ids), 1), torch.cat((values, top_values), 1)
    wanted = torch.arange(most, device=raw.device) < counts[:, None]
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


def _bytes(values: Tensor, kind: type) -> bytes:
    return values.cpu().numpy().astype(kind, copy=False).tobytes()
