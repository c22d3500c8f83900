"""Between Launch and the first step of a model that gives vectors: see ``zlm.worker.startup``.

The compute type is float32 on a CPU unless a flag says otherwise: vectors are kept and compared
with those of other programs. On a GPU steps run eagerly, as nothing is decoded there.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zlm.config import DenseSpec, PoolingSpec, Resolved
from zlm.errors import ConfigError
from zlm.messages import Execute, Join, SamplingSpec, WorkerReady
from zlm.models import registry, shares
from zlm.ops.backend import Ops
from zlm.ops.parallel import Parallel
from zlm.ops.select import select
from zlm.weights.load import open_weights
from zlm.weights.load_progress import LoadProgress
from zlm.worker import compute_type, gpu_measure, group_caches, memory_plan
from zlm.worker.dummy_weights import DummyWeights
from zlm.worker.memory_plan import MemoryPlan
from zlm.worker.parallel import Group, join
from zlm.worker.pooler import Pooler, read_dense
from zlm.worker.pooling_runner import PoolingRunner
from zlm.worker.slots import SlotTables

log = logging.getLogger("zlm.worker")


def start(
    resolved: Resolved, rank: int, say: Callable[[str], None], meeting: Path = Path()
) -> tuple[PoolingRunner, WorkerReady, MemoryPlan | None]:
    """Load the model of *resolved* and make it ready; *say* is told of each phase.

    With other ranks this one meets them at the file *meeting*. Raises ConfigError or ModelError,
    naming the flag or the tensor.
    """
    pooling = resolved.spec.pooling
    assert pooling is not None, "a model of text has another start"
    config = resolved.config
    device = torch.device("cpu")
    if resolved.device == "cpu":
        compute_type.set_threads(config.parallel.cpu_threads, config.parallel.workers_per_node)
    else:
        device = gpu_measure.open_device(rank % config.parallel.workers_per_node)
    group = join(device, rank, config.parallel, meeting)
    dtype = _dtype(resolved)
    compute = config.compute
    ops = select(
        device,
        dtype,
        kv_dtype=group_caches.kv_type(resolved, dtype),
        attention=compute.attention_backend,
        deterministic=compute.deterministic,
    )
    say("loading weights")
    model, pooler = _load(resolved, pooling, ops, say, group.parallel)
    _tell(resolved, pooling)
    own = shares.resolved_of_worker(resolved)
    plan = _plan(own, ops, group)
    runner = _runner(own, model, pooler, plan, ops)
    say("warming up")
    _warm_up(runner, own, plan)
    totals = plan.totals if plan is not None else []
    name = str(dtype).removeprefix("torch.")
    return runner, WorkerReady(rank, totals, resolved.device, name), plan


def _tell(resolved: Resolved, pooling: PoolingSpec) -> None:
    width = resolved.spec.output_size
    if pooling.num_labels:
        log.info("scores: %d labels, %s", pooling.num_labels, pooling.activation)
        return
    log.info(
        "embeddings: %d dimensions, pooled by %s, %d dense layers, %s",
        width,
        pooling.kind,
        len(pooling.dense),
        "of length 1" if pooling.normalize else "not normalized",
    )


def _dtype(resolved: Resolved) -> torch.dtype:
    """Return the compute type: ``--dtype``, or float32 on a CPU and the checkpoint's on a GPU."""
    name = resolved.config.model.dtype
    if name != "auto":
        return compute_type.SPELLINGS[name]
    if resolved.device == "cpu":
        return torch.float32
    wanted = compute_type.SPELLINGS.get(resolved.spec.checkpoint_dtype, torch.float32)
    has_bfloat16 = torch.cuda.get_device_capability() >= (8, 0)
    return wanted if has_bfloat16 or wanted != torch.bfloat16 else torch.float16


def _load(
    resolved: Resolved,
    pooling: PoolingSpec,
    ops: Ops,
    say: Callable[[str], None],
    parallel: Parallel,
) -> tuple[registry.Model, Pooler]:
    """Read the model and the dense layers on top of it, each from its own files."""
    began = time.perf_counter()
    spec, options = resolved.spec, resolved.config.model
    with ExitStack() as stack:
        weights: registry.Weights
        if options.load_format == "dummy":
            weights = DummyWeights(spec, options.seed or 0, ops.device)
        else:
            opened = open_weights(resolved.model_path, spec, ops.device)
            stack.callback(opened.close)
            weights = opened
        length = resolved.max_model_len
        model = registry.build(
            spec, weights, ops=ops, max_model_len=length, parallel=parallel,
            on_read=LoadProgress(say),
        )  # fmt: skip

        def read(layer: DenseSpec, name: str) -> Tensor:
            if not layer.path:
                return weights.get(name)
            module = open_weights(Path(resolved.model_path) / layer.path, spec)
            try:
                return module.get(name)
            finally:
                module.close()

        dense = read_dense(pooling.dense, read, ops.device)
    log.info("weights loaded in %.2f s", time.perf_counter() - began)
    return model, Pooler(pooling, dense, spec.hidden_size)


def _plan(resolved: Resolved, ops: Ops, group: Group) -> MemoryPlan | None:
    """Plan the KV cache; None for an encoder, which has none."""
    if not resolved.kv_groups:
        return None
    cache = resolved.config.cache
    free = compute_type.free_memory() // resolved.config.parallel.workers_per_node
    if ops.device.type == "cuda":
        free = int(torch.cuda.mem_get_info()[0] * cache.gpu_memory_utilization)
    plan = memory_plan.plan(
        group_caches.facts(resolved, ops.block_bytes, ops.kv_dtype),
        memory_plan.demand(resolved),
        free_bytes=free,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        num_blocks_override=cache.num_blocks_override,
    )
    plan = group.least_blocks(plan)
    for line in plan.table():
        log.info("%s", line)
    return plan


def _runner(
    resolved: Resolved, model: registry.Model, pooler: Pooler, plan: MemoryPlan | None, ops: Ops
) -> PoolingRunner:
    groups, size = resolved.kv_groups, resolved.config.cache.block_size_tokens
    totals = plan.totals if plan is not None else []
    tables = SlotTables(
        num_slots=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        vocab_size=resolved.spec.vocab_size,
        num_groups=len(groups),
        block_size=size,
        device=ops.device,
    )
    return PoolingRunner(
        model,
        pooler,
        group_caches.allocate(resolved, totals, ops, ops.kv_dtype),
        tables,
        ops=ops,
        group_layers=[group.layers for group in groups],
        windows=[group.window_tokens for group in groups],
        block_size=size,
        num_slots=resolved.max_num_seqs,
    )


def _warm_up(runner: PoolingRunner, resolved: Resolved, plan: MemoryPlan | None) -> None:
    """Run a step of one row, as long as rows get: what it needs of memory has been taken once."""
    count = min(resolved.max_num_batched_tokens, resolved.max_model_len)
    size = resolved.config.cache.block_size_tokens
    if plan is not None:
        count = min(count, min(plan.num_blocks) * size)
    groups = range(len(resolved.kv_groups))
    blocks = range(-(-count // size))
    entries = np.array([(g, 0, i, i + 1) for g in groups for i in blocks], np.int32).reshape(-1, 4)
    columns = [column.tobytes() for column in entries.T]
    ids = np.zeros(count, np.int32).tobytes()

    def one(value: int) -> bytes:
        return np.array([value], np.int32).tobytes()

    result = runner.execute(
        Execute(
            step=0,
            slots=one(0),
            starts=one(0),
            counts=one(count),
            sample=b"\0",
            joins=[Join(0, ids, count, SamplingSpec(seed=0))],
            table_groups=columns[0],
            table_slots=columns[1],
            table_indices=columns[2],
            table_blocks=columns[3],
        )
    )
    if result.pooled is None:
        raise ConfigError("the warm-up of the embedding model gave no vector")
