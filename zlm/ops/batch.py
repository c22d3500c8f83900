"""The batch of one step, as models and ops see it.

Built by the worker's model runner from its slot tables, read by layers and ops, changed by nobody.
It knows token ids, positions and where keys and values lie; it knows nothing of requests, sampling
or the scheduler.

The tokens of a step stand in one flat row, sequence after sequence. A *row* is one sequence's part
of the step; rows of one token (decodes) come first:

    token      0   1   2 | 3   4   5   6 | 7   8
    row        0   1   2 | 3             | 4          num_decodes = 3
    query_starts = [0, 1, 2, 3, 7, 9]                 query_lens = [1, 1, 1, 4, 2]

A KV group (layers of one attention kind) has its own block table. The first ``context_len``
tokens of a row's sequence lie in its blocks, token ``t`` in block ``t // block_size`` of the table.
Entries that a sliding window has left behind point at block 0, the null block.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where one KV group keeps the keys and values of this step's rows."""

    slot_mapping: Tensor  # int64 [T]: block * block_size + offset where each token's K and V go
    block_table: Tensor  # int32 [R, B]; B covers the longest row of this step
    # Tokens that a query sees, itself included; 0: all before it; -n: those of its chunk of n.
    window: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens in R rows; ``num_decodes`` rows of one token first, then prefill rows."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    query_starts: Tensor  # int32 [R + 1]: offsets of the rows in T
    seq_lens: Tensor  # int32 [R]: tokens of each row's sequence after this step
    num_decodes: int
    query_lens: list[int]  # tokens of each row in this step: a copy, so that ops need not sync
    context_lens: list[int]  # ``seq_lens`` as Python integers; both empty if only a device has them
    groups: list[GroupBatch]
    token_types: Tensor | None = None  # int64 [T]: segments of pairs; None: all of segment 0
    # int32 [S]: the tokens whose hidden states are wanted, by their place in T, each the last of
    # its row; None: all. Of others the last layer need only compute keys and values.
    picked: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]
