"""Which rows' keys and values of e4m3 are widened before prefill attention reads them.

A plan is made once a step and KV group, on the device, as that of tiles is; each layer then widens
into the same memory, which is a GpuOps' own. See ``zlm.kernels.kv_widen``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zlm.kernels import kv_widen
from zlm.ops.backend import Geometry
from zlm.ops.batch import GroupBatch, StepBatch

# Tiles of a row that read a key, from which widening it once costs less: one reading a key of e4m3
# takes a fifth of a widening longer than of 16 bits (8B's shape on an H200, bench/RESULTS.md).
LEAST_TILES = 8
LEAST_TOKENS = 1024  # of a step: of one with fewer, two more launches are no small part


@dataclass(frozen=True, slots=True)
class WidenedRows:
    """The plan of a step and KV group."""

    storage: Tensor  # float16 [n]: no NaN, as what no query sees of it is read too
    bases: Tensor  # int32 [R]: where each row's blocks are, -1 if it is not widened
    sources: Tensor  # int32 [C]
    count: Tensor  # int32 [1]
    pdl: bool

    def of(self, cache: Tensor) -> Tensor:
        """Return the rows' blocks of *cache*, widened: float16 [C, Hkv, 2, block_size, D]."""
        shape = self.sources.shape[0], *cache.shape[1:]
        out = self.storage[: self.sources.shape[0] * cache[0].numel()].view(shape)
        kv_widen.widen(cache, self.sources, self.count, out=out, pdl=self.pdl)
        return out


def plan(
    batch: StepBatch,
    group: GroupBatch,
    geometry: Geometry,
    storage: Tensor,
    block_size: int,
    first: int,
    queries: int,
    *,
    pdl: bool,
) -> WidenedRows | None:
    """Plan for the rows from *first* on, in tiles of *queries*; None if no row is worth it.

    Whether there is one is known from the number of tokens, for the step to be captured.
    """
    of_block = 2 * geometry.num_kv_heads * block_size * geometry.head_dim
    capacity = storage.shape[0] // of_block
    if batch.num_tokens - first < LEAST_TOKENS or not capacity or geometry.head_dim % 2:
        return None
    device, rows = storage.device, batch.num_rows - first
    bases, sources, count = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (rows, capacity, 1)
    )
    kv_widen.plan_widening(
        group.block_table[first:],
        batch.query_starts[first:],
        batch.seq_lens[first:],
        bases=bases,
        sources=sources,
        count=count,
        least=LEAST_TILES * queries,
        block_size=block_size,
        window=group.window,
        pdl=pdl,
    )
    return WidenedRows(storage, bases, sources, count, pdl)
