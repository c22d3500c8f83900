"""Everything between Launch and the first step: compute type, weights, KV cache, warm-up.

``start`` takes what is to run and returns a runner that has already run a maximal step, so that the
memory it needs has been taken once and nothing is slow or fails at the first request.
"""

import ctypes
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zlm.config import Resolved
from zlm.config_types import online_quantization
from zlm.messages import Execute, Join, SamplingSpec, WorkerReady
from zlm.models import registry, shares
from zlm.ops import cpu_process
from zlm.ops.backend import Ops
from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_native import NativeKernels
from zlm.ops.parallel import ALONE, Parallel
from zlm.weights.load import GGUFWeights, open_weights
from zlm.weights.load_progress import LoadProgress
from zlm.weights.mxfp4 import MXFP4Weights
from zlm.weights.online import OnlineQuantized
from zlm.weights.quantized import QuantizedWeights
from zlm.worker import (
    compute_type,
    group_caches,
    kernel_cache,
    memory_plan,
    native_build,
    pooling_startup,
)
from zlm.worker.dummy_weights import DummyWeights
from zlm.worker.kernel_farm import Farm
from zlm.worker.memory_plan import MemoryPlan
from zlm.worker.model_runner import ModelRunner
from zlm.worker.parallel import Group, join
from zlm.worker.runner import Runner
from zlm.worker.slots import SlotTables
from zlm.worker.stage_runner import StageRunner, WholeRunner

log = logging.getLogger("zlm.worker")

# Checkpoints that give weights as they are quantized.
KEEPING = (GGUFWeights, QuantizedWeights, OnlineQuantized, MXFP4Weights)
WARM_UP_DECODES = 4  # rows of the decode step at the end of the warm-up


@dataclass(frozen=True, slots=True)
class Started:
    """A runner that can work, and what the engine core is told of it."""

    runner: Runner
    ready: WorkerReady
    longest_step_seconds: float = 0.0  # of the warm-up; 0.0: not measured
    memory: dict[str, Any] | None = None  # the plan's facts; None: there is no KV cache
    answers: bool = True  # its results are the engine core's


def start(
    resolved: Resolved,
    rank: int,
    say: Callable[[str], None],
    meeting: Path = Path(),
    farm: Farm | None = None,
) -> Started:
    """Load the model of *resolved* and make it ready; *say* is told of each phase.

    With other ranks this one meets them at the file *meeting*. *farm*: of
    ``kernel_farm.start_early``. Raises ConfigError or ModelError, naming the flag or the tensor.
    """
    if resolved.device == "cuda":
        kernel_cache.prepare()
    if resolved.spec.pooling is not None:
        pooling, ready, blocks = pooling_startup.start(resolved, rank, say, meeting)
        facts = None if blocks is None else blocks.facts()
        return Started(pooling, ready, memory=facts, answers=rank == 0)
    if resolved.device == "cuda":
        from zlm.worker import gpu_startup  # needs Triton

        return gpu_startup.start(resolved, rank, say, meeting, farm)
    parallel = resolved.config.parallel
    threads = compute_type.set_threads(parallel.cpu_threads, parallel.workers_per_node)
    group = join(torch.device("cpu"), rank, parallel, meeting)
    free_bytes = compute_type.free_memory()
    say("choosing the compute type")
    keep, dtype, narrow = _compute_type(resolved, group, free_bytes)
    say("loading weights")
    kv_dtype = group_caches.kv_type(resolved, dtype)
    ops = CpuOps(dtype, kv_dtype=kv_dtype, quantized=keep, narrow=narrow, native=_kernels())
    model = load_model(resolved, ops, say, keep_quantized=keep, parallel=group.parallel)
    say("allocating the KV cache")
    own = shares.resolved_of_worker(resolved, rank)
    plan = _plan(own, ops, kv_dtype, group)
    for line in plan.table():
        log.info("%s", line)
    tables, whole = _runner(own, model, plan, ops, kv_dtype)
    runner = whole if group.parallel.stage.is_last else StageRunner(whole)
    say("warming up")
    began = time.perf_counter()
    warm_up(runner, tables, plan, own)
    seconds = time.perf_counter() - began
    _give_back_memory()
    log.info("warm-up took %.2f s with %d threads", seconds, threads)
    name = str(dtype).removeprefix("torch.")
    ready = WorkerReady(rank, plan.totals, resolved.device, name)
    return Started(runner, ready, seconds, plan.facts(), answers=group.answers)


def _compute_type(
    resolved: Resolved, group: Group, free_bytes: int
) -> tuple[bool, torch.dtype, bool]:
    """Return whether weights stay quantized, the compute type, and whether products are narrow.

    The first rank chooses for all: it may have measured.
    """
    options, spec = resolved.config.model, resolved.spec
    types = (torch.bfloat16, torch.float32)
    keep = dtype = narrow = 0
    if group.worker == 0:
        keep = int(compute_type.keeps_quantized(options, spec))
        if keep:
            narrow = int(compute_type.is_short(spec, free_bytes))
        else:
            dtype = types.index(compute_type.choose(options.dtype, spec, free_bytes=free_bytes))
    keep, dtype, narrow = group.of_first((keep, dtype, narrow))
    return bool(keep), types[dtype], bool(narrow)


def _kernels() -> NativeKernels | None:
    """Return the CPU's compiled kernels, if this machine can have them."""
    library = native_build.library()
    if library is None:
        return None
    try:
        kernels = NativeKernels(library)
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels cannot be loaded, decoding takes longer: %s", error)
        return None
    log.info("the CPU has kernels of its own: %s", library)
    return kernels


def load_model(
    resolved: Resolved,
    ops: Ops,
    say: Callable[[str], None],
    *,
    keep_quantized: bool = False,
    parallel: Parallel = ALONE,
) -> registry.Model:
    """Build the model that *resolved* names, from its checkpoint or with random weights.

    say: is told now and then how much has been read.
    keep_quantized: products are made of the checkpoint's codes, which *ops* then must take.
    parallel: the ranks, of which this one has its part.
    """
    began = time.perf_counter()
    spec, options = resolved.spec, resolved.config.model

    def build(weights: registry.Weights) -> registry.Model:
        length = resolved.max_model_len
        matrix = None
        online = online_quantization(resolved.config, spec)
        if online is not None:
            weights = OnlineQuantized(weights, online)
        if keep_quantized and isinstance(weights, KEEPING):
            matrix = weights.matrix
        is_alone = keep_quantized and parallel.size == 1
        rows = weights.rows if is_alone and isinstance(weights, GGUFWeights) else None
        return registry.build(
            spec, weights, ops=ops, max_model_len=length, quantized=matrix, rows=rows,
            parallel=parallel,
            on_read=LoadProgress(say),
        )  # fmt: skip

    if options.load_format == "dummy":
        model = build(DummyWeights(spec, options.seed or 0, ops.device))
    else:
        with closing(open_weights(resolved.model_path, spec, ops.device)) as weights:
            model = build(weights)
    _give_back_memory()
    cpu_process.keep_freed_memory()
    log.info("weights loaded in %.2f s", time.perf_counter() - began)
    return model


def _give_back_memory() -> None:
    """Return to the system what a start took and freed: 0.2 GB for SmolLM2 read from GGUF."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)


def _plan(resolved: Resolved, ops: Ops, kv_dtype: torch.dtype, group: Group) -> MemoryPlan:
    """Plan the KV cache of a rank; those of a machine share its memory, all have as many blocks."""
    cache = resolved.config.cache
    plan = memory_plan.plan(
        group_caches.facts(resolved, ops.block_bytes, kv_dtype),
        memory_plan.demand(resolved),
        free_bytes=compute_type.free_memory() // resolved.config.parallel.workers_per_node,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        num_blocks_override=cache.num_blocks_override,
    )
    return group.least_blocks(plan)


def _runner(
    resolved: Resolved,
    model: registry.Model,
    plan: MemoryPlan,
    ops: Ops,
    kv_dtype: torch.dtype,
) -> tuple[SlotTables, ModelRunner]:
    """Allocate the caches and the slot tables, and put the runner over them."""
    groups, size = resolved.kv_groups, resolved.config.cache.block_size_tokens
    tables = SlotTables(
        num_slots=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        vocab_size=resolved.spec.vocab_size,
        num_groups=len(groups),
        block_size=size,
        device=ops.device,
    )
    runner = ModelRunner(
        model,
        group_caches.allocate(resolved, plan.totals, ops, kv_dtype),
        tables,
        group_layers=[group.layers for group in groups],
        windows=[group.window_tokens for group in groups],
        block_size=size,
        vocab_size=resolved.spec.vocab_size,
    )
    return tables, runner


def warm_up(runner: WholeRunner, tables: SlotTables, plan: MemoryPlan, resolved: Resolved) -> None:
    """Run a prefill step as large as steps get and a small decode step, then undo their traces."""
    size, num_groups = plan.block_size_tokens, len(plan.num_blocks)
    usable = min(plan.num_blocks)
    prefill = min(resolved.max_num_batched_tokens, resolved.max_model_len - 1, usable * size)
    decodes = min(WARM_UP_DECODES, resolved.max_num_seqs, usable)
    blocks = list(range(1, max(-(-prefill // size), decodes) + 1))
    drawing = SamplingSpec(seed=0, temperature=0.8, top_p=0.9)
    longest = Join(0, np.zeros(prefill, np.int32).tobytes(), prefill, SamplingSpec(seed=0))
    needed = list(enumerate(blocks[: -(-prefill // size)]))
    table = [(group, 0, index, block) for group in range(num_groups) for index, block in needed]
    runner.execute(step_message([(0, 0, prefill, 1)], [longest], table))
    joins = [Join(slot, np.zeros(1, np.int32).tobytes(), 1, drawing) for slot in range(decodes)]
    table = [(group, slot, 0, slot + 1) for group in range(num_groups) for slot in range(decodes)]
    runner.execute(step_message([(slot, 0, 1, 1) for slot in range(decodes)], joins, table))
    # The null block still is all zeros: copied over the blocks used, it clears them.
    runner.copy_blocks([(group, 0, block) for group in range(num_groups) for block in blocks])
    tables.reset()


def step_message(
    rows: list[tuple[int, int, int, int]], joins: list[Join], table: list[tuple[int, int, int, int]]
) -> Execute:
    """Return a step of *rows* (slot, start, count, sample).

    *table* has its block-table entries (group, slot, index, block).
    """
    slots, starts, counts, sample = np.array(rows, np.int32).T
    groups, table_slots, indices, blocks = (c.tobytes() for c in np.array(table, np.int32).T)
    return Execute(
        step=0,
        slots=slots.tobytes(),
        starts=starts.tobytes(),
        counts=counts.tobytes(),
        sample=sample.astype(np.uint8).tobytes(),
        joins=joins,
        table_groups=groups,
        table_slots=table_slots,
        table_indices=indices,
        table_blocks=blocks,
    )
