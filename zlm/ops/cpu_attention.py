"""Paged attention on the CPU: rows are packed into few calls of torch's flash attention.

Theory of operation. A step's rows are cut into *pieces*: up to ``TILE_TOKENS`` queries of one row,
and the blocks from the first that any of them sees to the last, rounded up to a multiple of
``BLOCKS_QUANTUM``. Pieces of one shape, r of them with L queries and B blocks, form a *packet*:

    blocks of the packet  ──one copy of whole blocks──►  [r, B * block_size, 2, Hkv, D]
    queries               ──index or slice───────────►  [r, L, Hq, D]
    mask                  ──made once a step─────────►  [r, 1, L, B * block_size]

and one flash attention call gives all its rows. Surplus keys are masked; they are finite (the cache
never holds a NaN), so that they weigh exactly nothing. The shape of a piece follows from its own
row, never from its neighbours', and each row of a call is computed by itself: so a row's result has
the same bits in any company.

A packet's keys and values are kept to about ``PACKET_BYTES``: what the copy wrote is still in the
second-level cache when attention reads it, and no more than that is ever allocated. The plan,
with masks and indices, is shared by all layers of a group.

Prompts computed in one go need no copy at all: they attend to the keys and values just computed.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops import kv_cache
from zlm.ops.batch import GroupBatch, StepBatch

TILE_TOKENS = 256  # queries of a piece
BLOCKS_QUANTUM = 4  # blocks of a piece are a multiple of this: few shapes, at most 3 copied in vain
PACKET_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries ``start .. start + length`` of a row's sequence, and the blocks that they see."""

    row: int
    token: int  # index of the first query among the step's tokens
    start: int  # position of the first query in its sequence
    length: int
    first_block: int  # index in the row's block table
    num_blocks: int  # rounded up; may reach past the table's end


@dataclass(frozen=True, slots=True)
class Packet:
    """Pieces of one shape, computed by one call."""

    tokens: slice | Tensor  # the queries among the step's tokens, r * L of them
    rows: int
    blocks: Tensor  # int64 [r * B]
    mask: Tensor  # [r, 1, L, B * block_size], 0 or -inf, in the type of the queries

    def run(
        self, q: Tensor, cache: Tensor, scratch: Tensor, out: Tensor, scale: float, softcap: float
    ) -> None:
        """Write the packet's rows of *out* [T', Hq * D]; *scratch* takes the copied blocks."""
        num_kv_heads, head_dim = cache.shape[3:]
        copied = kv_cache.gather(cache, self.blocks, scratch[: self.blocks.shape[0]])
        if copied.dtype != q.dtype:
            copied = copied.to(q.dtype)
        kv = copied.view(self.rows, -1, 2, num_kv_heads, head_dim)
        tokens = self.tokens
        chosen = q[tokens] if isinstance(tokens, slice) else q.index_select(0, tokens)
        queries = chosen.unflatten(0, (self.rows, -1)).transpose(1, 2)
        keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        heads = _attend(queries, keys, values, self.mask, scale, softcap)
        result = heads.transpose(1, 2).reshape(-1, out.shape[1])
        if isinstance(tokens, slice):
            out[tokens] = result
        else:
            out.index_copy_(0, tokens, result)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Rows of equal length that begin their sequences: their keys are those of this step."""

    tokens: slice
    rows: int

    def run(self, q: Tensor, kv: Tensor, out: Tensor, scale: float, softcap: float) -> None:
        """Write the rows of *out* [T', Hq * D]; q [T', Hq, D], kv [T', 2, Hkv, D]."""
        queries = q[self.tokens].unflatten(0, (self.rows, -1)).transpose(1, 2)
        new = kv[self.tokens].unflatten(0, (self.rows, -1))
        keys, values = new[:, :, 0].transpose(1, 2), new[:, :, 1].transpose(1, 2)
        heads = _attend(queries, keys, values, None, scale, softcap)
        out[self.tokens] = heads.transpose(1, 2).reshape(-1, out.shape[1])


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's attention work for one KV group."""

    prompts: list[Prompts]
    packets: list[Packet]
    num_tokens: int
    scratch: Tensor  # [most blocks of a packet, block_size, 2, Hkv, D], overwritten by each packet

    def run(self, q: Tensor, kv: Tensor, cache: Tensor, *, scale: float, softcap: float) -> Tensor:
        """Return [T', Hq * D]; see ``zlm.ops.attention.attention``."""
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype)
        out[self.num_tokens :] = 0.0
        for prompts in self.prompts:
            prompts.run(q, kv, out, scale, softcap)
        for packet in self.packets:
            packet.run(q, cache, self.scratch, out, scale, softcap)
        return out


def plan(batch: StepBatch, group: GroupBatch, cache: Tensor, dtype: torch.dtype) -> CpuPlan:
    """Plan the attention of *batch* in one KV group, with queries of *dtype*."""
    block_size = cache.shape[1]
    prompts: list[Prompts] = []
    pieces: list[Piece] = []
    token = 0
    for row, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        whole = length == context and (not group.window or length <= group.window)
        if whole and length > 1 and cache.dtype == dtype:
            _add_prompt(prompts, token, length)
        else:
            pieces.extend(_pieces(row, token, context - length, length, group.window, block_size))
        token += length
    block_bytes = cache[0].numel() * cache.element_size()
    packets = [_packet(members, group, block_size, dtype) for members in _pack(pieces, block_bytes)]
    largest = max((packet.blocks.shape[0] for packet in packets), default=0)
    scratch = torch.empty((largest, *cache.shape[1:]), dtype=cache.dtype)
    return CpuPlan(prompts, packets, batch.num_tokens, scratch)


def _add_prompt(prompts: list[Prompts], token: int, length: int) -> None:
    """Add a whole prompt, to the batch before it if that is adjacent and of equal length."""
    if prompts:
        last = prompts[-1]
        if last.tokens.stop == token and (token - last.tokens.start) == last.rows * length:
            prompts[-1] = Prompts(slice(last.tokens.start, token + length), last.rows + 1)
            return
    prompts.append(Prompts(slice(token, token + length), 1))


def _pieces(
    row: int, token: int, start: int, length: int, window: int, block_size: int
) -> Iterator[Piece]:
    for offset in range(0, length, TILE_TOKENS):
        count = min(TILE_TOKENS, length - offset)
        position = start + offset
        first = max(0, position + 1 - window) // block_size if window else 0
        needed = -(-(position + count) // block_size) - first
        num_blocks = -(-needed // BLOCKS_QUANTUM) * BLOCKS_QUANTUM
        yield Piece(row, token + offset, position, count, first, num_blocks)


def _pack(pieces: list[Piece], block_bytes: int) -> Iterator[list[Piece]]:
    """Split *pieces* into packets of one shape and bounded size."""
    shapes: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        shapes[piece.length, piece.num_blocks].append(piece)
    for (_, num_blocks), members in shapes.items():
        count = max(1, PACKET_BYTES // (num_blocks * block_bytes))
        for start in range(0, len(members), count):
            yield members[start : start + count]


def _packet(members: list[Piece], group: GroupBatch, block_size: int, dtype: torch.dtype) -> Packet:
    """Build the indices and the mask of a packet."""
    length, num_blocks = members[0].length, members[0].num_blocks
    numbers = torch.tensor([(p.row, p.token, p.start, p.first_block) for p in members])
    row, token, start, first_block = numbers.unsqueeze(-1).unbind(1)  # each [r, 1]
    columns = first_block + torch.arange(num_blocks)  # [r, B]
    table = group.block_table
    blocks = table[row, columns.clamp_(max=table.shape[1] - 1)].flatten()
    queries = torch.arange(length)
    key = first_block * block_size + torch.arange(num_blocks * block_size)  # [r, S]
    ahead = (start + queries).unsqueeze(2) - key.unsqueeze(1)  # [r, L, S]: of key by query
    hidden = ahead < 0
    if group.window:
        hidden |= ahead >= group.window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    first, count = members[0].token, len(members) * length
    if members[-1].token + length - first == count:
        return Packet(slice(first, first + count), len(members), blocks, mask.unsqueeze(1))
    return Packet((token + queries).flatten(), len(members), blocks, mask.unsqueeze(1))


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Return [r, Hq, L, D] for queries of that shape and keys, values [r, Hkv, S, D].

    mask [r, 1, L, S] or None, which means causal with L = S.
    """
    grouped = queries.shape[1] != keys.shape[1]
    if not softcap:
        return F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    if grouped:
        repeats = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale / softcap).tanh_()
    scores.mul_(softcap)
    if mask is None:
        length = queries.shape[2]
        later = torch.ones((length, length), dtype=torch.bool).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    else:
        scores.add_(mask)
    return torch.matmul(scores.softmax(-1), values)
