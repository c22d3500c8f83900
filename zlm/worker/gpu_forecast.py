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
    try:
        planned = _plan(resolved, card, dtype)
    except ConfigError as error:
        return Forecast(card, None, error.message, _longest(resolved, card, dtype))
    return Forecast(card, planned, longest=_longest(resolved, card, dtype))


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
    groups = group_caches.facts(resolved, kv_cache.block_bytes, dtype)
    return gpu_memory.plan(resolved, card, needed, groups)


def _longest(resolved: Resolved, card: Card, dtype: torch.dtype) -> int:
    """Return the longest --max-model-len that fits, in whole blocks; 0 if none does."""
    size = resolved.config.cache.block_size_tokens
    low, high = 0, resolved.spec.max_position // size
    while low < high:
        middle = (low + high + 1) // 2
        shorter = msgspec.structs.replace(resolved, max_model_len=middle * size)
        try:
            _plan(shorter, card, dtype)
            low = middle
        except ConfigError:
            high = middle - 1
    return low * size
