"""Paged attention on the CPU: rows are packed into few calls of torch's flash attention.

Theory of operation. A step's rows are cut into *pieces*: up to ``TILE_TOKENS`` queries of one row,
and the blocks from the first that any of them sees to the last, rounded up to a multiple of
``BLOCKS_QUANTUM``. Pieces of one shape, r of them with L queries and B blocks, form a *packet*:

    blocks of the packet  ──one copy of whole blocks──►  [r, B * block_size, 2, Hkv, D]
    queries               ──brought together, viewed─►  [r, Hq, L, D]
    mask                  ──made once a step─────────►  [r, 1, L, B * block_size]

and one flash attention call gives all its rows. Queries are brought into the order of the packets,
and results back into that of the tokens, once a layer. Surplus keys are masked; they are finite
(the cache never keeps a NaN), so that they weigh exactly nothing. The shape of a piece follows from
its own row, never from its neighbours', and each row of a call is computed by itself: so a row's
result has the same bits in any company (given ``zlm.ops.cpu_process``).

A packet's keys and values are kept to about ``PACKET_BYTES``: what the copy wrote is still in a
cache of the processor when attention reads it, and no more than that is ever allocated. The plan,
with masks, indices and views of the copy, is shared by all layers of a group: at small batches a
step is bound by the number of torch calls.

Prompts computed in one go need no copy at all: they attend to the keys and values just computed. In
bfloat16 all but short and very long ones are two plain products with a softmax between them, whose
half is masked: for 9 heads over 3 of 64, 2 x 128 / 256 / 512 tokens, .44 / .73 / 2.5 ms a layer,
and .72 / 1.1 / 4.3 in flash attention. Scores are rounded to bfloat16 so, as weights are anyway.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.config import first_seen
from zlm.ops import kv_cache, onednn
from zlm.ops.backend import Geometry
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.ops.scores import Scores

TILE_TOKENS = 256  # queries of a piece
BLOCKS_QUANTUM = 2  # blocks of a piece are a multiple of this: few shapes, little copied in vain
PACKET_BYTES = 2 * 1024 * 1024
# Pieces of fewer queries are computed in float32 whatever the type: 32 rows of one query over 256
# keys took 5.8 ms in bfloat16 against 1.3, for want of a matrix product to speed up. But a single
# query's heads that share keys are such a matrix, and keys and values need no conversion then: 30
# layers of 9 heads over 3 of 64, 224 keys, 1 / 8 / 32 rows: 1.9 / 7.1 / 28 ms, 2.8 / 8.3 / 49 so.
NARROW_QUERIES = 16
PRODUCT_TOKENS = 128  # of a prompt, from which on its scores are a product; level at 64
PRODUCT_BYTES = 32 * 1024 * 1024  # of these scores, at most


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
class HeadScales:
    """What the numbers of a cache of e4m3 are to be times, by query head: [Hq, 1, 1] float32."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, kv_scales: Tensor, geometry: Geometry) -> "HeadScales":
        """Return those of *kv_scales* [2, Hkv]."""
        repeats = geometry.num_heads // geometry.num_kv_heads
        keys, values = kv_scales.repeat_interleave(repeats, 1)[:, :, None, None]
        return cls(keys, values)


@dataclass(frozen=True, slots=True)
class Packet:
    """Pieces of one shape, computed by one call."""

    first: int  # index of the first query in the order of the packets
    rows: int  # r
    length: int  # L
    blocks: Tensor  # integers [r * B]
    mask: Tensor  # [r, 1, L, B * block_size], 0 or -inf, in the type that is computed in
    copied: Tensor  # [r * B, block_size, 2, Hkv, D]: scratch, where the blocks are copied
    keys: Tensor  # [r, Hkv, B * block_size, D] ┐ views of the scratch
    values: Tensor  # the same                  ┘

    def run(
        self,
        ordered: Tensor,
        geometry: Geometry,
        cache: Tensor,
        scores: Scores,
        scales: HeadScales | None,
    ) -> Tensor:
        """Return the attention of the packet's queries, [r * L, Hq * D]."""
        raw = kv_cache.raw
        torch.index_select(raw(cache), 0, self.blocks, out=raw(self.copied))
        heads = geometry.num_heads
        queries = _view(geometry, ordered, self.first, self.rows, self.length, 0, heads)
        kind = self.mask.dtype
        as_matrix = self.length == 1 and kind != torch.float32
        if as_matrix:
            queries = queries.view(self.rows, geometry.num_kv_heads, -1, geometry.head_dim)
            kind = kind if scores.is_plain else torch.float32
        keys, values = self.keys.to(kind), self.values.to(kind)
        queries = queries.to(kind)
        if scales is not None:
            queries = queries * scales.keys.view(queries.shape[1], -1, 1).to(kind)
        result = _attend(queries, keys, values, self.mask, scores)
        if scales is not None:
            result = result * scales.values.view(queries.shape[1], -1, 1)
        result = result if as_matrix else result.transpose(1, 2)
        return result.reshape(-1, geometry.q_row).to(ordered.dtype)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Rows of equal length that begin their sequences: their keys are those of this step."""

    first: int  # index of the first query among the step's tokens
    rows: int
    length: int
    mask: Tensor | None = None  # [1, Hq / Hkv * L, L], 0 or -inf: scores may be a product

    @property
    def end(self) -> int:
        return self.first + self.rows * self.length

    def run(self, qkv: Tensor, geometry: Geometry, scores: Scores) -> Tensor:
        """Return the attention of the rows' queries, [rows * length, Hq * D]."""
        q, kv = geometry.num_heads, geometry.num_kv_heads
        queries, keys, values = (
            _view(geometry, qkv, self.first, self.rows, self.length, head, count)
            for head, count in ((0, q), (q, kv), (q + kv, kv))
        )
        if self.mask is None or not scores.is_plain:
            result = _attend(queries, keys, values, None, scores)
        else:
            heads = self.rows * kv, -1, geometry.head_dim  # one matrix for those that share keys
            keys = keys.reshape(heads).transpose(1, 2)
            masked = torch.baddbmm(self.mask, queries.reshape(heads), keys, alpha=scores.scale)
            result = torch.bmm(masked.softmax(-1), values.reshape(heads)).view(queries.shape)
        return result.transpose(1, 2).reshape(-1, geometry.q_row)


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's attention work for one KV group."""

    geometry: Geometry
    slots: Tensor  # int64 [T]: where keys and values go
    prompts: list[Prompts]
    packets: list[Packet]
    order: Tensor | None  # int64: tokens in the order of the packets; None: they stand so
    restore: Tensor | None  # int64 [T']: where each row's result is; None: in its place

    def run(
        self, qkv: Tensor, cache: Tensor, scores: Scores, scales: HeadScales | None = None
    ) -> Tensor:
        """Return causal, windowed attention [T', Hq * D] of one layer over its paged cache.

        qkv [T', (Hq + 2 Hkv) * D], contiguous: q, k and v of this step's tokens, q and k rotated; k
        and v have been written to *cache* before. What padding rows get is finite and means
        nothing. scales: of a cache of e4m3.
        """
        geometry = self.geometry
        ordered = qkv if self.order is None else qkv.index_select(0, self.order)
        results = [prompts.run(qkv, geometry, scores) for prompts in self.prompts]
        for packet in self.packets:
            results.append(packet.run(ordered, geometry, cache, scores, scales))
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result if self.restore is None else result.index_select(0, self.restore)


def plan(
    batch: StepBatch,
    group: GroupBatch,
    cache: Tensor,
    geometry: Geometry,
    num_rows: int,
    dtype: torch.dtype,
    first_row: int = 0,
) -> CpuPlan:
    """Plan the attention of *batch* for the layers of a KV group; *cache* is any of theirs.

    Queries are of *dtype* and come in *num_rows* rows: the T tokens of the step, then padding. The
    step's rows before *first_row*, of one token each, are left out.
    """
    block_size = cache.shape[1]
    prompts: list[Prompts] = []
    pieces: list[Piece] = []
    token = 0
    for row in range(first_row, batch.num_rows):
        length, context = batch.query_lens[row], batch.context_lens[row]
        whole = length == context and (not group.window or length <= abs(group.window))
        if whole and length > 1 and cache.dtype == dtype:
            _add_prompt(prompts, token, length)
        else:
            pieces.extend(_pieces(row, token, context - length, length, group.window, block_size))
        token += length
    fast = dtype == torch.bfloat16 and onednn.can_pack(dtype)
    if fast and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        prompts = [_as_product(each, geometry) for each in prompts]
    packs = list(_pack(pieces, cache[0].numel() * cache.element_size()))
    largest = max((len(members) * members[0].num_blocks for members in packs), default=0)
    scratch = torch.empty((largest, *cache.shape[1:]), dtype=cache.dtype)
    packets: list[Packet] = []
    first = 0
    for members in packs:
        as_matrix = members[0].length == 1 and geometry.num_heads > geometry.num_kv_heads
        kind = dtype if as_matrix or members[0].length >= NARROW_QUERIES else torch.float32
        packets.append(_packet(first, members, group, scratch, kind))
        first += len(members) * members[0].length
    order, restore = _orders(prompts, packs, num_rows)
    return CpuPlan(geometry, group.slot_mapping[first_row:], prompts, packets, order, restore)


def _view(
    geometry: Geometry, qkv: Tensor, first: int, rows: int, length: int, head: int, n: int
) -> Tensor:
    """Return heads ``head .. head + n`` of ``rows * length`` tokens, [rows, n, length, D]."""
    row, dim = geometry.row, geometry.head_dim
    offset = first * row + head * dim + qkv.storage_offset()
    return qkv.as_strided((rows, n, length, dim), (length * row, dim, row, 1), offset)


def _orders(
    prompts: list[Prompts], packs: list[list[Piece]], num_rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the plan's ``order`` and ``restore``."""
    whole = [token for p in prompts for token in range(p.first, p.end)]
    packed = [
        token for members in packs for p in members for token in range(p.token, p.token + p.length)
    ]
    order = None if packed == list(range(len(packed))) else torch.tensor(packed)
    if whole + packed == list(range(num_rows)):
        return order, None
    restore = torch.zeros(num_rows, dtype=torch.int64)  # a padding row gets the first result
    restore[torch.tensor(whole + packed)] = torch.arange(len(whole) + len(packed))
    return order, restore


def _add_prompt(prompts: list[Prompts], token: int, length: int) -> None:
    """Add a whole prompt, to the batch before it if that is adjacent and of equal length."""
    if prompts and prompts[-1].end == token and prompts[-1].length == length:
        prompts[-1] = Prompts(prompts[-1].first, prompts[-1].rows + 1, length)
    else:
        prompts.append(Prompts(token, 1, length))


def _as_product(prompts: Prompts, geometry: Geometry) -> Prompts:
    """Return *prompts* with the mask of a product, if that is faster."""
    length, heads = prompts.length, geometry.num_heads
    score_bytes = prompts.rows * heads * length**2 * torch.bfloat16.itemsize
    if length < PRODUCT_TOKENS or score_bytes > PRODUCT_BYTES:
        return prompts
    mask = torch.full((length, length), float("-inf"), dtype=torch.bfloat16).triu_(1)
    return replace(prompts, mask=mask.repeat(heads // geometry.num_kv_heads, 1).unsqueeze(0))


def _pieces(
    row: int, token: int, start: int, length: int, window: int, block_size: int
) -> Iterator[Piece]:
    for offset in range(0, length, TILE_TOKENS):
        count = min(TILE_TOKENS, length - offset)
        position = start + offset
        first = max(0, first_seen(position, window)) // block_size
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


def _packet(
    first: int, members: list[Piece], group: GroupBatch, scratch: Tensor, kind: torch.dtype
) -> Packet:
    """Build the indices, the mask and the views of a packet, which is computed in *kind*."""
    rows, length, num_blocks = len(members), members[0].length, members[0].num_blocks
    numbers = torch.tensor([(p.row, p.start, p.first_block) for p in members])
    row, start, first_block = numbers.unsqueeze(-1).unbind(1)  # each [r, 1]
    columns = first_block + torch.arange(num_blocks)  # [r, B]
    table = group.block_table
    blocks = table[row, columns.clamp_(max=table.shape[1] - 1)].flatten()
    block_size = scratch.shape[1]
    key = first_block * block_size + torch.arange(num_blocks * block_size)  # [r, S]
    query = start + torch.arange(length)  # [r, L]
    query, key = query.unsqueeze(2), key.unsqueeze(1)
    hidden = key > query  # [r, L, S]
    if group.window:
        hidden |= key < first_seen(query, group.window)
    mask = torch.zeros(hidden.shape, dtype=kind).masked_fill_(hidden, float("-inf"))
    copied = scratch[: rows * num_blocks]
    keys, values = copied.view(rows, -1, *scratch.shape[2:]).transpose(1, 3).unbind(2)
    return Packet(first, rows, length, blocks, mask.unsqueeze(1), copied, keys, values)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, how: Scores
) -> Tensor:
    """Return [r, Hq, L, D] for queries of that shape and keys, values [r, Hkv, S, D].

    mask [r, 1, L, S] or None, which means causal with L = S. For single queries of heads as a
    matrix [r, Hkv, Hq / Hkv, D] the result has their shape.
    """
    grouped = queries.shape[1] != keys.shape[1]
    if how.is_plain:
        return F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=how.scale, enable_gqa=grouped
        )
    if grouped:
        repeats = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = how.apply_(torch.matmul(queries, keys.transpose(-1, -2)))
    if mask is None:
        length = queries.shape[2]
        later = torch.ones((length, length), dtype=torch.bool).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    else:
        scores.add_(mask)
    return torch.matmul(how.weights(scores), values)
