"""Attention of rows of many tokens through torch's own, for cards without ``tl.dot``.

Row by row, a row's keys and values are gathered from the paged cache to dense tensors, and torch's
scaled dot product attention reads them with an explicit mask for causality and window. Torch has no
soft cap: with one the products are plain and float32. Lengths must be known on the host, so such a
step cannot be captured in a graph.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.config import first_seen
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.ops.kv_cache import FP8, raw
from zlm.ops.scores import Scores

TILE_QUERIES = 256  # queries of a call: bounds its mask, [queries, keys]


@dataclass(frozen=True, slots=True)
class GatheredRow:
    """One row: its queries among the step's tokens, and the blocks that any of them sees."""

    token: int  # index of its first query
    length: int  # queries
    context: int  # tokens of its sequence, the queries being the last
    first_block: int  # of the row's table
    blocks: Tensor  # int32 [n]


@dataclass(frozen=True, slots=True)
class GatheredPrefill:
    """See ``zlm.ops.gpu_attention.Prefill``."""

    rows: list[GatheredRow]
    window: int

    def run(
        self, q: Tensor, cache: Tensor, out: Tensor, scores: Scores, kv_scales: Tensor | None
    ) -> None:
        for row in self.rows:
            self._run_row(row, q, cache, out, scores, kv_scales)

    def _run_row(
        self,
        row: GatheredRow,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        scores: Scores,
        kv_scales: Tensor | None,
    ) -> None:
        group = q.shape[1] // cache.shape[1]
        stored = raw(cache).index_select(0, row.blocks).view(cache.dtype).to(q.dtype)
        kv = stored.permute(2, 1, 0, 3, 4).flatten(2, 3)
        if kv_scales is not None and cache.dtype == FP8:
            kv = kv * kv_scales[:, :, None, None].to(q.dtype)
        keys, values = kv.repeat_interleave(group, 1)  # [Hq, S, D]
        position = torch.arange(row.context - row.length, row.context, device=q.device)
        key = torch.arange(keys.shape[1], device=q.device) + row.first_block * cache.shape[3]
        for start in range(0, row.length, TILE_QUERIES):
            stop = min(start + TILE_QUERIES, row.length)
            query = position[start:stop, None]
            seen = key <= query
            if self.window:
                seen &= key >= first_seen(query, self.window)
            tokens = slice(row.token + start, row.token + stop)
            queries = q[tokens].transpose(0, 1)
            result = _attend(queries, keys, values, seen, scores)
            out[tokens] = result.transpose(0, 1)


def plan(batch: StepBatch, group: GroupBatch, block_size: int) -> GatheredPrefill:
    """Plan the attention of the rows after the decodes, in blocks of *block_size* tokens."""
    assert len(batch.query_lens) == batch.num_rows, "the sdpa backend needs lengths on the host"
    rows = []
    token = batch.num_decodes
    for row in range(batch.num_decodes, batch.num_rows):
        length, context = batch.query_lens[row], batch.context_lens[row]
        if length:
            first = max(0, first_seen(context - length, group.window)) // block_size
            blocks = group.block_table[row, first : -(-context // block_size)]
            rows.append(GatheredRow(token, length, context, first, blocks))
        token += length
    return GatheredPrefill(rows, group.window)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, how: Scores) -> Tensor:
    """Return [Hq, L, D] for queries of that shape, keys and values [Hq, S, D], seen [L, S]."""
    if how.is_plain:
        return F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], seen, scale=how.scale
        )[0]
    scores = how.apply_(queries.float() @ keys.float().transpose(1, 2))
    weights = how.weights(scores.masked_fill_(~seen, float("-inf")))
    return (weights @ values.float()).to(queries.dtype)
