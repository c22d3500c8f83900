"""What a server takes of a GPU, known from shapes before there is a tensor, or a GPU at all.

``capacities`` is what the start plans with; ``forecast`` is the whole plan for a card that need not
be here (``zlm plan``). Owns nothing.
"""

import math
from dataclasses import dataclass

import msgspec
import torch

from zlm.config import Resolved
from zlm.errors import ConfigError
from zlm.models.tensors import expected_tensors
from zlm.ops import kv_cache
from zlm.worker import gpu_costs, gpu_graphs, gpu_memory, group_caches, memory_plan
from zlm.worker.gpu_costs import MATRIX_UNITS, MIB, Capacities, Card
from zlm.worker.gpu_memory import GpuPlan
from zlm.worker.gpu_steps import StepShape, StepSizes

# Tokens times parameters up to which a step of prompts is captured. Beyond, the card computes for
# longer than the host takes to launch (18 ms for a prefill of 30 layers), and a graph would only
# hold memory: that of a second step of its size.
CAPTURE_BOUND = 8 * 10**12
ONLINE_KINDS = tuple(gpu_costs.ONLINE_BYTES)  # of --quantization, for a plain checkpoint
TYPICAL_CONTEXT_BYTES = 512 * MIB  # what the driver holds for a process: 0.3 to 0.6 GiB by card


@dataclass(frozen=True, slots=True)
class Forecast:
    """Whether a server fits a card, and what then."""

    card: Card
    plan: GpuPlan | None  # None: it does not fit
    reason: str = ""  # why not, and what to change
    longest: int = 0  # tokens: the largest --max-model-len that fits with the other flags; 0: none


def largest_captured(resolved: Resolved, sizes: StepSizes) -> StepShape:
    """Return a shape that no captured step exceeds."""
    tensors = expected_tensors(resolved.spec).values()
    longest = CAPTURE_BOUND // sum(math.prod(shape) for shape in tensors)
    return sizes.largest(min(resolved.max_num_batched_tokens, max(longest, 1)))


def capacities(resolved: Resolved, sizes: StepSizes, *, prefill_graphs: bool) -> Capacities:
    """Return what no step exceeds; *prefill_graphs*: steps with prompts are captured as well."""
    largest = sizes.largest(resolved.max_num_batched_tokens)
    captured = sizes.decode_buckets[-1]
    if prefill_graphs:
        captured = largest_captured(resolved, sizes).num_tokens
    eager = resolved.config.compute.enforce_eager
    return Capacities(
        tokens=largest.num_tokens,
        samples=sizes.max_samples,
        slots=resolved.max_num_seqs + 1,
        graph_tokens=0 if eager else captured,
        num_graphs=0 if eager else gpu_graphs.MAX_GRAPHS,
        rows=largest.num_rows + 1,
    )


def absent_card(total_bytes: int, capability: tuple[int, int]) -> Card:
    """Return a card of *total_bytes* that nobody else uses."""
    name = f"a GPU of {total_bytes / 2**30:.1f} GiB"
    free = total_bytes - TYPICAL_CONTEXT_BYTES
    return Card(name, total_bytes, free, capability=capability)


def forecast(resolved: Resolved, card: Card, dtype: torch.dtype) -> Forecast:
    """Return what serving *resolved* on *card* in *dtype* would come to."""
    most = _longest(resolved, card, dtype)
    try:
        return Forecast(card, _plan(resolved, card, dtype), longest=most)
    except ConfigError as error:
        return Forecast(card, None, error.message, most)


def longest(resolved: Resolved, card: Card, dtype: torch.dtype) -> int:
    """Return the most tokens of a sequence, up to ``max_model_len``, that *card* has room for.

    Raises ConfigError that tells what is too large, if it has none.
    """
    most = min(_longest(resolved, card, dtype), resolved.max_model_len)
    if not most:
        size = resolved.config.cache.block_size_tokens
        _plan(msgspec.structs.replace(resolved, max_model_len=size), card, dtype)
    return most


def lighter(resolved: Resolved, card: Card, dtype: torch.dtype) -> list[str]:
    """Return the flags of fewer bits, each by itself, with which it would fit *card*."""
    config, fitting = resolved.config, []
    cache = msgspec.structs.replace(config.cache, kv_cache_dtype="fp8")
    ways = {"--kv-cache-dtype fp8": msgspec.structs.replace(config, cache=cache)}
    if not gpu_costs.keeps_codes(resolved, dtype.itemsize):
        for kind in ONLINE_KINDS:
            model = msgspec.structs.replace(config.model, quantization=kind)
            ways[f"--quantization {kind}"] = msgspec.structs.replace(config, model=model)
    for flag, way in ways.items():
        changed = msgspec.structs.replace(resolved, config=way)
        if forecast(changed, card, dtype).plan is not None:
            fitting.append(flag)
    return fitting


def concurrency(resolved: Resolved, planned: GpuPlan, tokens: int) -> int:
    """Return how many sequences of *tokens* tokens run at once."""
    wanted = msgspec.structs.replace(resolved, max_model_len=tokens)
    demand = memory_plan.demand(wanted)
    blocks = zip(planned.blocks.groups, planned.blocks.num_blocks, strict=True)
    fits = min(count // memory_plan.blocks_of_sequence(group, demand) for group, count in blocks)
    return min(fits, resolved.max_num_seqs)


def _plan(resolved: Resolved, card: Card, dtype: torch.dtype) -> GpuPlan:
    backend = resolved.config.compute.attention_backend
    is_torch = backend == "sdpa" or (backend == "auto" and card.capability < MATRIX_UNITS)
    sizes = StepSizes(resolved.max_num_seqs)
    limits = capacities(resolved, sizes, prefill_graphs=not is_torch)
    needed = gpu_costs.costs(resolved, card, limits, element_bytes=dtype.itemsize)
    kv_dtype = group_caches.kv_type(resolved, dtype)
    groups = group_caches.facts(resolved, kv_cache.block_bytes, kv_dtype)
    return gpu_memory.plan(resolved, card, needed, groups)


def _longest(resolved: Resolved, card: Card, dtype: torch.dtype) -> int:
    """Return the longest --max-model-len that fits: all, or whole blocks; 0 if none does."""
    size, whole = resolved.config.cache.block_size_tokens, resolved.spec.max_position

    def fits(tokens: int) -> bool:
        try:
            _plan(msgspec.structs.replace(resolved, max_model_len=tokens), card, dtype)
        except ConfigError:
            return False
        return True

    low, high = 0, whole // size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * size) else (low, middle - 1)
    return whole if low == whole // size and fits(whole) else low * size
