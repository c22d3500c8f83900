"""How a GPU's memory is shared out: arithmetic, no tensor and no device.

What the card is comes in as a ``Card``, what all but the KV cache takes as ``Costs``; the result is
a ``GpuPlan`` that is printed, allocated from, and at last compared with what a maximal step took
(``verify``). Nothing is measured on the way, so it costs no time and serves machines without a GPU.

    total                                          the card
    ├─ others                                      held by other processes now
    └─ utilization * total: the server's budget    must be free, as vLLM has it
       ├─ costs                                    see ``gpu_costs``
       └─ KV cache                                 all that is left, in blocks (``memory_plan``)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zlm.config import Resolved
from zlm.errors import ConfigError
from zlm.worker import memory_plan
from zlm.worker.gpu_costs import MIB, Card, Costs
from zlm.worker.memory_plan import GIB, Demand, GroupFacts, MemoryPlan

SAFE_UTILIZATION = 0.97  # no error proposes more
SHORTEST_CONTEXT = 128  # tokens; no error proposes less


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The outcome: what each part gets. ``blocks`` is the KV cache."""

    card: Card
    budget_bytes: int
    costs: Costs
    blocks: MemoryPlan

    @property
    def torch_bytes(self) -> int:
        """What torch may come to reserve."""
        return self.costs.allocated + self.blocks.total_bytes

    def parts(self) -> list[tuple[str, int]]:
        """Return what is in the card's memory, in bytes, and what is left."""
        costs, total = self.costs, self.card.total_bytes
        used = costs.total + self.blocks.total_bytes
        others = total - self.card.available_bytes
        return [
            ("weights", costs.weights),
            ("tables, sampling", costs.tables),
            ("activations", costs.activations),
            ("CUDA graphs", costs.graphs),
            ("context, reserve", costs.context + costs.reserve),
            ("KV cache", self.blocks.total_bytes),
            ("other processes", others),
            ("left free", total - others - used),
        ]

    def facts(self) -> dict[str, Any]:
        """Return the plan as values: see ``MemoryPlan.facts``."""
        return {**self.blocks.facts(), "title": self.card.name, "parts": self.parts()}

    def table(self) -> list[str]:
        """Return the plan as lines of text for the log."""
        total = self.card.total_bytes
        share = self.budget_bytes / total
        size, name = f"{total / GIB:.1f} GiB", self.card.name
        head = name if name.endswith(size) else f"{name}: {size}"  # a card that is not here
        lines = [f"{head}, of which zlm may use {share:.0%}"]
        lines += [f"{name:<18}{size / GIB:>9.2f} GiB" for name, size in self.parts()]
        return lines + self.blocks.table()[:-1]


# ----------------------------------------------------------------------------------------- the plan


def plan(resolved: Resolved, card: Card, needed: Costs, groups: Sequence[GroupFacts]) -> GpuPlan:
    """Give the KV cache what *needed* leaves of the budget.

    Raises ConfigError, with the numbers and the flag to change, if the budget is not free, or if it
    cannot hold *needed* and one sequence of ``max_model_len`` tokens.
    """
    options, wanted = resolved.config.cache, memory_plan.demand(resolved)
    budget = int(card.total_bytes * options.gpu_memory_utilization)
    least = least_kv_bytes(groups, wanted)
    if options.kv_cache_memory_bytes is not None:  # says what to use; no share is asked for then
        budget = card.available_bytes
    elif budget > card.available_bytes:
        raise ConfigError(_not_free(card, options.gpu_memory_utilization))
    left = budget - needed.total
    if left < least and options.num_blocks_override is None:
        raise ConfigError(_does_not_fit(resolved, card, needed, groups, budget))
    size = options.kv_cache_memory_bytes
    blocks = memory_plan.plan(
        groups,
        wanted,
        free_bytes=left,
        kv_cache_memory_bytes=left if size is None else size,
        num_blocks_override=options.num_blocks_override,
    )
    if blocks.total_bytes > left:
        raise ConfigError(
            f"--num-gpu-blocks-override {options.num_blocks_override}: these blocks take "
            f"{blocks.total_bytes / GIB:.2f} GiB, but {max(left, 0) / GIB:.2f} GiB of GPU memory "
            f"are left for them"
        )
    return GpuPlan(card, budget, needed, blocks)


def least_kv_bytes(groups: Sequence[GroupFacts], wanted: Demand) -> int:
    """Return what one sequence of ``max_model_len`` tokens needs, null blocks included."""
    return sum(
        (memory_plan.blocks_of_sequence(group, wanted) + 1) * group.block_bytes for group in groups
    )


def longest_context(groups: Sequence[GroupFacts], wanted: Demand, left: int) -> int:
    """Return the largest max_model_len, all or whole blocks, that *left* bytes hold once."""
    size = wanted.block_size_tokens
    if least_kv_bytes(groups, wanted) <= left:
        return wanted.max_model_len
    low, high = 0, wanted.max_model_len // size
    while low < high:
        middle = (low + high + 1) // 2
        fits = least_kv_bytes(groups, replace(wanted, max_model_len=middle * size)) <= left
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * size


def _not_free(card: Card, share: float) -> str:
    total, available = card.total_bytes, card.available_bytes
    who = f" ({card.holders})" if card.holders else ""
    text = (
        f"--gpu-memory-utilization {share:g} wants {share * total / GIB:.2f} GiB of the "
        f"{total / GIB:.2f} GiB of {card.name}, but {available / GIB:.2f} GiB are free: other "
        f"processes hold {(total - available) / GIB:.2f} GiB{who}. End them"
    )
    possible = math.floor(available / total * 100) / 100
    return f"{text}, or give --gpu-memory-utilization {possible:g}" if possible > 0 else text


def _does_not_fit(
    resolved: Resolved, card: Card, needed: Costs, groups: Sequence[GroupFacts], budget: int
) -> str:
    wanted = memory_plan.demand(resolved)
    least = least_kv_bytes(groups, wanted)
    share = resolved.config.cache.gpu_memory_utilization
    parts = (
        f"weights {needed.weights / GIB:.2f}, activations {needed.activations / GIB:.2f}, "
        f"tables {needed.tables / GIB:.2f}, CUDA graphs {needed.graphs / GIB:.2f}, "
        f"context and reserve {(needed.context + needed.reserve) / GIB:.2f}"
    )
    advice = []
    possible = min(card.available_bytes / card.total_bytes, SAFE_UTILIZATION)
    enough = math.ceil((needed.total + least) / card.total_bytes * 100) / 100
    if share < enough <= possible:
        advice.append(f"give --gpu-memory-utilization {enough:g}")
    length = longest_context(groups, wanted, budget - needed.total)
    if length >= SHORTEST_CONTEXT:
        advice.append(f"give --max-model-len {length} or less")
    of_steps = needed.activations + needed.graphs + needed.tables
    if of_steps > needed.weights // 8 and needed.total - of_steps < budget:
        advice.append(
            f"lower --max-num-batched-tokens ({resolved.max_num_batched_tokens}) or "
            f"--max-num-seqs ({resolved.max_num_seqs})"
        )
    return (
        f"the model does not fit the GPU: {needed.total / GIB:.2f} GiB ({parts}) and "
        f"{least / GIB:.2f} GiB of KV cache for one sequence of --max-model-len "
        f"{wanted.max_model_len} tokens are more than the {budget / GIB:.2f} of "
        f"{card.total_bytes / GIB:.2f} GiB that may be used (--gpu-memory-utilization {share:g}): "
        + (", or ".join(advice) or "take a smaller or quantized model, a larger GPU, or several")
    )


# ---------------------------------------------------------------------------------- what was needed


@dataclass(frozen=True, slots=True)
class Measured:
    """What a maximal step was seen to take, in bytes."""

    reserved_bytes: int  # the most that torch has reserved
    free_bytes: int  # of the card, now


def verify(planned: GpuPlan, measured: Measured) -> list[str]:
    """Return lines for the log that compare *planned* with *measured*.

    Raises ConfigError, with the numbers and the flag to change, if more was needed than planned.
    """
    limit, taken = planned.torch_bytes, measured.reserved_bytes
    if taken > limit:
        kv_bytes = planned.blocks.total_bytes
        safe = (kv_bytes - (taken - limit)) // MIB * MIB
        advice = f"give --kv-cache-memory-bytes {safe}" if safe > 0 else "give a shorter context"
        raise ConfigError(
            f"the largest step took {taken / GIB:.2f} GiB of GPU memory where "
            f"{limit / GIB:.2f} GiB were planned, {(taken - limit) / GIB:.2f} GiB too much: "
            f"{advice}, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    lines = [
        f"largest step: torch has reserved {taken / GIB:.2f} GiB of the {limit / GIB:.2f} GiB "
        f"planned, {measured.free_bytes / GIB:.2f} GiB of the GPU are free"
    ]
    used = planned.costs.total + planned.blocks.total_bytes
    expected = planned.card.available_bytes - used
    if measured.free_bytes < expected:
        lines.append(
            f"{(expected - measured.free_bytes) / GIB:.2f} GiB more of the GPU are held than "
            "planned: by the driver, or by other processes that have grown"
        )
    return lines
