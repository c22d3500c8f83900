"""How many KV blocks each group gets: arithmetic on shapes, no tensor and no device.

Facts of the device come in as arguments, the result is a ``MemoryPlan``. What is planned for:

* one sequence of ``max_model_len`` tokens must always fit, else the flags contradict the machine;
* a full group of n blocks holds n * block_size tokens. A sliding group frees what falls behind its
  window: a sequence never holds more than ``ceil((window + step tokens) / block size) + 2`` of its
  blocks, and never more than of a full group's. So sliding groups get as many blocks as the full
  group, but no more than all running sequences can hold: what fits the full group fits them;
* if that does not leave a full group room for one sequence, sliding groups are cut, down to one
  sequence's need.

Block 0 of every group is the null block: counts here are of usable blocks, ``totals`` adds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zlm.config import Resolved
from zlm.errors import ConfigError

DEFAULT_KV_BYTES = 2**30
PREFIX_CACHE_SHARE = 2  # a planned cache is at most this many times what running sequences fill
GIB = 2**30


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV group: its window in tokens (0: full; -n: chunks of n), and the bytes of a block in
    all its layers."""

    window_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the cache is for."""

    block_size_tokens: int
    max_model_len: int
    max_num_seqs: int
    step_tokens: int  # token budget of a step


def demand(resolved: Resolved) -> Demand:
    """Return what the KV cache is for."""
    return Demand(
        block_size_tokens=resolved.config.cache.block_size_tokens,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        step_tokens=resolved.max_num_batched_tokens,
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Usable blocks of each group, and what they take."""

    groups: tuple[GroupFacts, ...]
    num_blocks: tuple[int, ...]  # usable: without the null block
    block_size_tokens: int
    free_bytes: int  # what the device had to give

    @property
    def totals(self) -> list[int]:
        """Blocks to allocate in each group, the null block included."""
        return [count + 1 for count in self.num_blocks]

    @property
    def total_bytes(self) -> int:
        sizes = [group.block_bytes for group in self.groups]
        return sum(n * size for n, size in zip(self.totals, sizes, strict=True))

    def facts(self) -> dict[str, Any]:
        """Return the plan as values: what is shared out in bytes, and what each KV group gets.

        A group is its window in tokens (0: full), its usable blocks, their tokens, and its bytes.
        """
        groups = [
            (group.window_tokens, n, n * self.block_size_tokens, (n + 1) * group.block_bytes)
            for group, n in zip(self.groups, self.num_blocks, strict=True)
        ]
        taken = self.total_bytes
        parts = [("KV cache", taken), ("left free", max(0, self.free_bytes - taken))]
        return {"title": "memory beside the model", "parts": parts, "groups": groups}

    def table(self) -> list[str]:
        """Return the plan as lines of text for the log."""
        lines = [f"{'KV group':<16}{'blocks':>9}{'tokens':>11}{'MiB':>10}"]
        for group, count in zip(self.groups, self.num_blocks, strict=True):
            kind = "window" if group.window_tokens > 0 else "chunk"
            name = f"{kind} {abs(group.window_tokens)}" if group.window_tokens else "full"
            mib = (count + 1) * group.block_bytes / 2**20
            lines.append(f"{name:<16}{count:>9}{count * self.block_size_tokens:>11}{mib:>10.1f}")
        total, free = self.total_bytes / 2**20, self.free_bytes / 2**20
        lines.append(f"{'total':<16}{'':>20}{total:>10.1f} of {free:.1f} MiB free")
        return lines


def blocks_of_sequence(group: GroupFacts, demand: Demand) -> int:
    """Return the most blocks that one sequence ever holds in *group*."""
    size = demand.block_size_tokens
    whole = -(-demand.max_model_len // size)
    if not group.window_tokens:
        return whole
    chunk = min(demand.step_tokens, demand.max_model_len)
    return min(whole, -(-(abs(group.window_tokens) + chunk) // size) + 2)


def plan(
    groups: Sequence[GroupFacts],
    demand: Demand,
    *,
    free_bytes: int,
    kv_cache_memory_bytes: int | None = None,
    num_blocks_override: int | None = None,
) -> MemoryPlan:
    """Share the KV memory out to *groups*.

    *kv_cache_memory_bytes* is the user's budget. Without one the budget is 1 GiB, or what one
    sequence needs if that is more, but at most half of *free_bytes*. *num_blocks_override* gives
    every group so many blocks, the null block among them, even if no longest sequence fits.
    Raises ConfigError, with the numbers, if the budget cannot hold one sequence of
    ``max_model_len`` tokens.
    """
    if num_blocks_override is not None:
        if num_blocks_override < 2:
            raise ConfigError(
                f"--num-gpu-blocks-override {num_blocks_override} is less than 2, the null block "
                "and one to use"
            )
        counts = (num_blocks_override - 1,) * len(groups)
        return MemoryPlan(tuple(groups), counts, demand.block_size_tokens, free_bytes)
    needs = [blocks_of_sequence(group, demand) for group in groups]
    # One more block a group than the sequence needs: the null block.
    least = sum((n + 1) * g.block_bytes for n, g in zip(needs, groups, strict=True))
    budget = _budget(least, demand, free_bytes, kv_cache_memory_bytes)
    counts = _share(groups, needs, demand, budget - sum(g.block_bytes for g in groups))
    if kv_cache_memory_bytes is None:
        running = demand.max_num_seqs * PREFIX_CACHE_SHARE
        counts = tuple(min(c, n * running) for c, n in zip(counts, needs, strict=True))
    return MemoryPlan(tuple(groups), counts, demand.block_size_tokens, free_bytes)


def _budget(least: int, demand: Demand, free_bytes: int, given: int | None) -> int:
    sequence = f"one sequence of --max-model-len {demand.max_model_len} tokens"
    if given is not None:
        if given < least:
            raise ConfigError(
                f"--kv-cache-memory-bytes {given} is less than the {least} bytes that {sequence} "
                "needs: raise it, or lower --max-model-len"
            )
        if given > free_bytes:
            raise ConfigError(
                f"--kv-cache-memory-bytes {given} exceeds the {free_bytes} bytes that are free"
            )
        return given
    half = free_bytes // 2
    if least > half:
        raise ConfigError(
            f"{sequence} needs {least / GIB:.2f} GiB of KV cache, but only {half / GIB:.2f} GiB "
            f"(half of the {free_bytes / GIB:.2f} GiB that are free) may be planned: lower "
            "--max-model-len, or set --kv-cache-memory-bytes to at least "
            f"{least}"
        )
    return min(max(DEFAULT_KV_BYTES, least), half)


def _share(
    groups: Sequence[GroupFacts], needs: Sequence[int], demand: Demand, budget: int
) -> tuple[int, ...]:
    """Return usable blocks of each group within *budget* bytes; it can hold every need."""
    is_full = [group.window_tokens == 0 for group in groups]
    sizes = [group.block_bytes for group in groups]
    ceilings = [n * demand.max_num_seqs for n in needs]

    def counts(level: int) -> list[int]:
        # ``level`` blocks everywhere, as far as a sliding group can ever use them.
        return [
            level if full else min(level, top) for full, top in zip(is_full, ceilings, strict=True)
        ]

    def cost(level: int) -> int:
        return sum(c * size for c, size in zip(counts(level), sizes, strict=True))

    highest = budget // min(sizes) if any(is_full) else max(ceilings)
    low, high = 0, max(highest, 1)
    while low < high:  # the largest level within the budget
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    shares = counts(low)
    if all(share >= need for share, need in zip(shares, needs, strict=True)):
        return tuple(shares)
    return _share_tight(is_full, sizes, needs, budget)


def _share_tight(
    is_full: Sequence[bool], sizes: Sequence[int], needs: Sequence[int], budget: int
) -> tuple[int, ...]:
    """Give every group one sequence's need, and what is left to the sliding groups."""
    left = budget - sum(n * size for n, size in zip(needs, sizes, strict=True))
    sliding = sum(size for full, size in zip(is_full, sizes, strict=True) if not full)
    more = left // sliding if sliding else 0
    return tuple(n if full else n + more for full, n in zip(is_full, needs, strict=True))
