"""A layer's attention on the CPU: norms of q and k, rotation, the paged cache, and what it gives.

Rows of one token are the compiled kernels' (``zlm.ops.cpu_native``), if there are any; all other
rows, or without kernels all, are packed into torch's operations (``zlm.ops.cpu_attention``). What a
row gets does not depend on which others stand in its step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zlm.config import first_seen
from zlm.ops import cpu_attention, cpu_native, cpu_rotary, kv_cache
from zlm.ops.backend import Geometry
from zlm.ops.batch import StepBatch
from zlm.ops.cpu_attention import CpuPlan, HeadScales
from zlm.ops.cpu_native import NativeKernels, Structure
from zlm.ops.cpu_norm import HeadNorms, RMSNorm
from zlm.ops.scores import Scores


@dataclass(frozen=True, slots=True)
class CpuRotation:
    """How a step's positions turn its rows."""

    decodes: Structure | None  # for the kernels
    factors: Tensor | None  # complex64: what the other rows, if any, are multiplied with


@dataclass(frozen=True, slots=True)
class CpuWork:
    """A step's attention for one KV group: rows ``0 .. num_decodes`` by kernels, then the rest."""

    num_decodes: int
    decodes: Structure | None
    rest: CpuPlan | None


def rotation(
    table: Tensor, batch: StepBatch, geometry: Geometry, num_rows: int, num_decodes: int
) -> CpuRotation:
    """Prepare the rotation of *batch*, of *num_rows* rows with padding; see ``Ops.rotation``."""
    decodes, factors = None, None
    if num_decodes:
        decodes = cpu_native.rotation_of(table)
    if num_decodes < batch.num_tokens:
        rotated, values = geometry.num_heads + geometry.num_kv_heads, geometry.num_kv_heads
        positions = batch.positions[num_decodes:]
        factors = cpu_rotary.factors(table, positions, num_rows - num_decodes, rotated, values)
    return CpuRotation(decodes, factors)


def plan(
    batch: StepBatch,
    group_index: int,
    cache: Tensor,
    geometry: Geometry,
    num_rows: int,
    num_decodes: int,
    dtype: torch.dtype,
) -> CpuWork:
    """Plan the attention of *batch*, of *num_rows* rows with padding; see ``Ops.plan``."""
    group, decodes, rest = batch.groups[group_index], None, None
    if num_decodes:
        ends = batch.context_lens[:num_decodes]
        keys = [(max(0, first_seen(end - 1, group.window)), end) for end in ends]
        positions = batch.positions[:num_decodes]
        decodes = cpu_native.step_of(group, positions, keys, geometry, cache.shape[1])
    if num_decodes < batch.num_tokens:
        others = num_rows - num_decodes
        rest = cpu_attention.plan(batch, group, cache, geometry, others, dtype, num_decodes)
    return CpuWork(num_decodes, decodes, rest)


class CpuPagedAttention:
    """See ``zlm.ops.backend.PagedAttention``.

    In torch norm and rotation take q and k as one tensor of heads, and keys with values go to the
    cache in one write: nothing of the QKV rows is copied on the way.
    """

    def __init__(
        self,
        geometry: Geometry,
        scores: Scores,
        norms: HeadNorms | None,
        kv_scales: Tensor | None = None,
        native: NativeKernels | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """*norms*: of q and k. *native*, which takes rows of *dtype*: see ``CpuWork``."""
        self.geometry = geometry
        self.scores = scores
        self.norms = norms
        self.kv_scales = kv_scales
        self.scales = None if kv_scales is None else HeadScales.of(kv_scales, geometry)
        self._decode: Decode | None = None
        if native is not None:
            inside = None if norms is None else norms.of_each_head
            layer = cpu_native.layer_of(
                geometry, scores, dtype, norms=inside, eps=norms.eps if norms is not None else 0.0
            )
            before = norms.apply_ if norms is not None and inside is None else None
            self._decode = Decode(native, layer, geometry, before)

    def __call__(self, qkv: Tensor, rotation: CpuRotation, cache: Tensor, work: CpuWork) -> Tensor:
        return _attend(self._decode, self._others, qkv, rotation, cache, work)

    def _others(self, qkv: Tensor, rotation: CpuRotation, cache: Tensor, work: CpuWork) -> Tensor:
        assert rotation.factors is not None and work.rest is not None
        if self.norms is not None:
            self.norms.apply_(qkv)
        qkv = cpu_rotary.rotate(qkv, rotation.factors)
        kv_cache.write(cache, qkv[:, self.geometry.q_row :], work.rest.slots, self.kv_scales)
        return work.rest.run(qkv, cache, self.scores, self.scales)


class CpuReadingAttention:
    """See ``zlm.ops.backend.PagedAttention``: with keys and values that another layer has stored.

    In torch those of the step's own tokens are read back from the cache, so that rows are like any
    others.
    """

    def __init__(
        self,
        geometry: Geometry,
        scores: Scores,
        norm: RMSNorm | None,
        kv_scales: Tensor | None = None,
        native: NativeKernels | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """*norm*: of each head of q. *native*, which takes rows of *dtype*: see ``CpuWork``."""
        self.geometry = geometry
        self.scores = scores
        self.norm = norm
        self.scales = None if kv_scales is None else HeadScales.of(kv_scales, geometry)
        self._decode: Decode | None = None
        if native is not None:
            norms = None if norm is None else (norm.weight, None)
            eps = 0.0 if norm is None else norm.eps
            layer = cpu_native.layer_of(geometry, scores, dtype, norms=norms, eps=eps, stores=False)
            self._decode = Decode(native, layer, geometry, None)

    def __call__(self, qkv: Tensor, rotation: CpuRotation, cache: Tensor, work: CpuWork) -> Tensor:
        """Return [T', Hq * D] for *qkv* [T', Hq * D], queries alone."""
        return _attend(self._decode, self._others, qkv, rotation, cache, work)

    def _others(self, qkv: Tensor, rotation: CpuRotation, cache: Tensor, work: CpuWork) -> Tensor:
        geometry, plan = self.geometry, work.rest
        assert rotation.factors is not None and plan is not None
        if self.norm is not None:
            self.norm.apply_(qkv.view(qkv.shape[0], -1, geometry.head_dim))
        rows = qkv.new_zeros(qkv.shape[0], geometry.row)
        factors = rotation.factors[:, : geometry.q_row // 2]
        rows[:, : geometry.q_row] = cpu_rotary.rotate(qkv, factors)
        if cache.dtype == rows.dtype:  # else prompts too are read from the cache
            stored = cache.view(-1, geometry.row - geometry.q_row).index_select(0, plan.slots)
            rows[: plan.slots.shape[0], geometry.q_row :] = stored
        return plan.run(rows, cache, self.scores, self.scales)


Others = Callable[[Tensor, CpuRotation, Tensor, CpuWork], Tensor]


@dataclass(frozen=True, slots=True)
class Decode:
    """A layer of the kernels."""

    native: NativeKernels
    layer: Structure
    geometry: Geometry
    before: Callable[[Tensor], None] | None  # norms that the kernels do not have, in place

    def __call__(self, qkv: Tensor, rotation: CpuRotation, cache: Tensor, work: CpuWork) -> Tensor:
        """Return [T', Hq * D], of which the rows that decode are written."""
        assert work.decodes is not None and rotation.decodes is not None
        if self.before is not None:
            self.before(qkv[: work.num_decodes])
        out = qkv.new_empty(qkv.shape[0], self.geometry.q_row)
        self.native.decode_attention(self.layer, work.decodes, rotation.decodes, qkv, cache, out)
        return out


def _attend(
    decode: Decode | None,
    others: Others,
    qkv: Tensor,
    rotation: CpuRotation,
    cache: Tensor,
    work: CpuWork,
) -> Tensor:
    """Return the attention of a step: *decode*'s of its first rows, *others*' of the rest."""
    count = work.num_decodes
    if not count:
        return others(qkv, rotation, cache, work)
    assert decode is not None
    out = decode(qkv, rotation, cache, work)
    if work.rest is not None:
        out[count:] = others(qkv[count:], rotation, cache, work)
    elif count < out.shape[0]:
        out[count:].zero_()  # padding
    return out
