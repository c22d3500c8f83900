"""Paged attention on the GPU: rows of one token by the decode kernel, the rest by tiles.

A plan is made once a step and KV group, on the device; all layers of the group use it. Rows
``0 .. num_decodes`` go through ``zlm.kernels.attention_decode``, rows from there on through a
*prefill*: tiles of ``zlm.kernels.attention_prefill``, or what ``zlm.ops.gpu_gathered`` does where
that kernel cannot run. Either part may be absent. Nothing here depends on a value that is on the
device, so all of it can be captured in a graph.

The cache's layout is told in ``zlm.kernels.attention_decode``.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from zlm.kernels import (
    attention_decode,
    attention_decode_plan,
    attention_prefill,
    attention_prefill_plan,
    rms_norm,
    rotary_kv,
)
from zlm.kernels.attention_decode_plan import DecodeWorkspace
from zlm.ops import gpu_widened
from zlm.ops.backend import Geometry
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.ops.gpu_widened import WidenedRows
from zlm.ops.scores import Scores

# Columns of q, k and v from which the product before takes so long that reading ahead beside it
# gains: 2 % of an 8B model's steps, of 6144 columns; those of small models lose as much and more.
EARLY_COLUMNS = 6144


class Prefill(Protocol):
    """The attention of a step's rows of many tokens, for one KV group."""

    def run(
        self, q: Tensor, cache: Tensor, out: Tensor, scores: Scores, kv_scales: Tensor | None
    ) -> None:
        """Write to *out* [T, Hq, D] the rows' attention; q [T, Hq, D]. Other tokens are left.

        kv_scales: float32 [2, Hkv], of a cache of e4m3.
        """


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """A step's attention work for one KV group."""

    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: where keys and values go
    window: int
    block_table: Tensor  # int32 [D, B] ┐ of the rows of one token
    seq_lens: Tensor  # int32 [D]       ┘
    decode: Tensor | None  # int32: their plan
    prefill: Prefill | None

    def last_tokens(self) -> "GpuPlan":
        """Return a plan that need not compute more than the last token of each row."""
        if not isinstance(self.prefill, TiledPrefill):
            return self
        return replace(self, prefill=self.prefill.last_tokens())


@dataclass(frozen=True, slots=True)
class TiledPrefill:
    """Rows through the prefill kernel. *fixed*: a query's bits do not depend on its company.

    *widened*: rows whose keys and values are made 16 bits wide before.
    """

    block_table: Tensor  # int32 [R, B]
    query_starts: Tensor  # int32 [R + 1]: offsets among the step's tokens
    seq_lens: Tensor  # int32 [R]
    window: int
    queries: int  # of a tile
    tiles: Tensor  # int32 [items, 2]
    fixed: bool
    pdl: bool
    widened: WidenedRows | None = None

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        scores: Scores,
        kv_scales: Tensor | None,
        turns: Tensor | None = None,
    ) -> None:
        """See ``Prefill``. *turns*: the rotary table if q is still to be rotated."""
        rows = self.widened
        bases = None if rows is None else rows.bases
        for widened in (None,) if rows is None else (None, rows.of(cache)):
            attention_prefill.attention_prefill(
                q,
                cache,
                self.block_table,
                self.query_starts,
                self.seq_lens,
                self.tiles,
                out=out,
                scale=scores.scale,
                window=self.window,
                softcap=scores.softcap,
                sinks=scores.sinks,
                kv_scales=kv_scales,
                turns=turns,
                fixed=self.fixed,
                bases=bases,
                widened=widened,
                pdl=self.pdl,
            )

    def last_tokens(self) -> "TiledPrefill":
        """Return the plan that computes the last token of each row, and few others.

        Of which nobody reads a key twice, so none is widened.
        """
        tiles = torch.empty(
            (self.seq_lens.shape[0], 2), dtype=torch.int32, device=self.tiles.device
        )
        attention_prefill_plan.plan_last_tiles(
            self.query_starts, out=tiles, queries=self.queries, pdl=self.pdl
        )
        return replace(self, tiles=tiles, widened=None)


def workspace(
    geometry: Geometry,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    use_dot: bool,
) -> DecodeWorkspace:
    """Allocate the buffers of decode attention."""
    return attention_decode_plan.allocate_workspace(
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        dtype,
        device,
        cache_dtype=kv_dtype,
        use_dot=use_dot,
    )


def plan_decodes(
    batch: StepBatch,
    group: GroupBatch,
    geometry: Geometry,
    buffers: DecodeWorkspace,
    *,
    pdl: bool,
) -> Tensor:
    """Plan the attention of the rows of one token."""
    count = batch.num_decodes
    size = attention_decode_plan.plan_size(count, buffers)
    out = torch.empty(size, dtype=torch.int32, device=batch.seq_lens.device)
    attention_decode_plan.plan_decode(
        batch.seq_lens[:count],
        out=out,
        workspace=buffers,
        num_kv_heads=geometry.num_kv_heads,
        window=group.window,
        pdl=pdl,
    )
    return out


def plan_tiles(
    batch: StepBatch,
    group: GroupBatch,
    geometry: Geometry,
    dtype: torch.dtype,
    first: int,
    *,
    fixed: bool,
    pdl: bool,
    storage: Tensor | None = None,
    block_size: int = 0,
) -> TiledPrefill:
    """Plan the attention of the rows from *first* on; those before have a token each.

    *storage*: float16, for the rows of a cache of e4m3, in blocks of *block_size*, that are widened
    (None: none is).
    """
    device = batch.seq_lens.device
    starts, lengths = batch.query_starts[first:], batch.seq_lens[first:]
    queries = attention_prefill_plan.tile_queries(
        geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, dtype, device
    )
    items = attention_prefill_plan.num_tiles(
        batch.num_tokens - first, batch.num_rows - first, queries
    )
    tiles = torch.empty((items, 2), dtype=torch.int32, device=device)
    if items:
        attention_prefill_plan.plan_prefill(
            starts, lengths, out=tiles, queries=queries, window=group.window, pdl=pdl
        )
    table, widened = group.block_table[first:], None
    if storage is not None:
        widened = gpu_widened.plan(
            batch, group, geometry, storage, block_size, first, queries, pdl=pdl
        )
    return TiledPrefill(table, starts, lengths, group.window, queries, tiles, fixed, pdl, widened)


class GpuPagedAttention:
    """See ``zlm.ops.backend.PagedAttention``. A step's *rotation* is the rotary table itself."""

    def __init__(
        self,
        geometry: Geometry,
        buffers: DecodeWorkspace,
        *,
        scale: float,
        softcap: float,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        sinks: Tensor | None,
        value_norm: bool,
        reads_only: bool,
        kv_scales: Tensor | None,
        pdl: bool,
    ) -> None:
        self.geometry = geometry
        self.buffers = buffers
        self.scores = Scores(scale, softcap, sinks)
        self.value_norm = value_norm
        self.reads_only = reads_only
        self.kv_scales = kv_scales
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.whole_norms: tuple[Tensor, Tensor] | None = None  # over all heads: launched before
        if q_norm is not None and k_norm is not None and q_norm.shape[0] != geometry.head_dim:
            self.whole_norms = q_norm, k_norm
            self.q_norm = self.k_norm = None
        self.eps = eps
        self.pdl = pdl
        # It may be: the product of q, k and v was launched since the step was prepared.
        self.early = geometry.row >= EARLY_COLUMNS

    def __call__(self, qkv: Tensor, rotation: Tensor, cache: Tensor, work: GpuPlan) -> Tensor:
        geometry = self.geometry
        shape = qkv.shape[0], geometry.num_heads, geometry.head_dim
        q = qkv[:, : geometry.q_row].view(shape)
        if self.whole_norms is not None:
            self._norm_whole_rows(qkv, *self.whole_norms)
        rows, tiled = work.seq_lens.shape[0], work.prefill
        if not (isinstance(tiled, TiledPrefill) and self._leaves_queries(rotation)):
            tiled = None
        rotary_kv.rotary_kv(
            qkv,
            work.positions,
            work.slots,
            rotation,
            cache,
            q_out=q,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            eps=self.eps,
            value_norm=self.value_norm,
            reads_only=self.reads_only,
            kv_scales=self.kv_scales,
            early=self.early,
            turned_queries=None if tiled is None else rows,
            pdl=self.pdl,
        )
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        if work.decode is not None:
            attention_decode.attention_decode(
                q[:rows],
                cache,
                work.block_table,
                work.seq_lens,
                work.decode,
                out=out[:rows],
                workspace=self.buffers,
                scale=self.scores.scale,
                window=work.window,
                softcap=self.scores.softcap,
                sinks=self.scores.sinks,
                kv_scales=self.kv_scales,
                early=self.early,
                pdl=self.pdl,
            )
        if tiled is not None:
            tiled.run(q, cache, out, self.scores, self.kv_scales, rotation)
        elif work.prefill is not None:
            work.prefill.run(q, cache, out, self.scores, self.kv_scales)
        return out.view(qkv.shape[0], geometry.q_row)

    def _leaves_queries(self, rotation: Tensor) -> bool:
        """Whether prefill attention rotates its queries itself: reading and writing them once less.

        Not where they are normed before, head by head.
        """
        plain = self.q_norm is None and not (self.value_norm or self.reads_only)
        return plain and rotation.is_complex()

    def _norm_whole_rows(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        """Norm q and k of *qkv*, each over all its heads, in place."""
        end = self.geometry.q_row
        for rows, weight in (
            (qkv[:, :end], q_weight),
            (qkv[:, end : end + k_weight.shape[0]], k_weight),
        ):
            rms_norm.rms_norm(rows, weight, self.eps, out=rows, pdl=self.pdl)
