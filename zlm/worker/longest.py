"""``python -m zlm.worker.longest``: the longest context that this machine's memory holds.

What ``--max-model-len auto`` comes to. A process of its own, as it needs torch, and CUDA where
there is a GPU: a ``Resolved`` (JSON) on standard input, {"tokens": N} or {"error": "why not"} on
standard output. Nothing is loaded: the plan is made of shapes, as the worker will make it.
"""

import sys
from dataclasses import replace

import msgspec
import torch

from zlm.config import Resolved
from zlm.errors import ZlmError
from zlm.models import shares
from zlm.ops import kv_cache
from zlm.process.linux import kill_when_parent_ends
from zlm.worker import (
    compute_type,
    gpu_forecast,
    gpu_measure,
    gpu_memory,
    group_caches,
    memory_plan,
)

# Of the card's memory, kept back: what loaded weights may take more than their shapes say.
GPU_MARGIN = 0.01
CPU_BYTES = {"bfloat16": 2}  # of a weight, by compute type; any other: 4


def longest(resolved: Resolved) -> int:
    """Return the most tokens of a sequence, at most ``max_model_len``, for which a start will plan.

    Raises ConfigError, as that start would, if there is no room for a sequence at all.
    """
    parallel = resolved.config.parallel
    stage = shares.largest_stage(resolved.spec, parallel.pipeline_parallel_size)
    own = shares.resolved_of_worker(resolved, stage * parallel.tensor_parallel_size)
    return _on_gpu(own) if resolved.device == "cuda" else _on_cpu(own)


def _on_gpu(resolved: Resolved) -> int:
    cache, dtype_name = resolved.config.cache, resolved.config.model.dtype
    card = gpu_measure.card(gpu_measure.open_device())
    kind = gpu_measure.compute_dtype(
        dtype_name, cache.kv_cache_dtype, resolved.spec, card.capability
    )
    share = max(cache.gpu_memory_utilization - GPU_MARGIN, GPU_MARGIN)
    cache = msgspec.structs.replace(cache, gpu_memory_utilization=share)
    config = msgspec.structs.replace(resolved.config, cache=cache)
    return gpu_forecast.longest(msgspec.structs.replace(resolved, config=config), card, kind)


def _on_cpu(resolved: Resolved) -> int:
    """Return the longest for half of what the weights leave (``memory_plan``)."""
    config, ranks = resolved.config, resolved.config.parallel.tensor_parallel_size
    name = config.model.dtype
    kind = torch.bfloat16 if name in CPU_BYTES else torch.float32
    weights = compute_type.weight_bytes(resolved.spec, CPU_BYTES.get(name, 4))
    free = max(compute_type.free_memory() // ranks - weights, 0)
    kv_dtype = group_caches.kv_type(resolved, kind)
    groups = group_caches.facts(resolved, kv_cache.block_bytes, kv_dtype)
    demand = memory_plan.demand(resolved)
    given = config.cache.kv_cache_memory_bytes
    room = free // 2 if given is None else min(given, free)
    tokens = gpu_memory.longest_context(groups, demand, room)
    if not tokens:  # say why
        shortest = replace(demand, max_model_len=demand.block_size_tokens)
        memory_plan.plan(groups, shortest, free_bytes=free, kv_cache_memory_bytes=given)
    return tokens


def main() -> int:
    """Read a Resolved, write the answer."""
    kill_when_parent_ends()
    resolved = msgspec.json.decode(sys.stdin.buffer.read(), type=Resolved)
    try:
        answer: dict[str, object] = {"tokens": longest(resolved)}
    except ZlmError as error:
        answer = {"error": error.message}
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
