"""Everything between Launch and the first step on a GPU: memory plan, weights, kernels, graphs.

The plan is made from shapes before a weight is read, so that a model that cannot fit fails at once;
it is made again with what the weights were seen to take, and verified by a step as large as steps
get. When ``start`` returns every kernel is compiled and every decode bucket is captured.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import triton

from zlm.config import Resolved
from zlm.messages import Execute, Join, SamplingSpec, WorkerReady
from zlm.models import registry, shares
from zlm.models.tensors import expected_tensors
from zlm.ops.backend import Ops
from zlm.ops.select import select
from zlm.worker import (
    gpu_costs,
    gpu_forecast,
    gpu_measure,
    gpu_memory,
    gpu_sampler_warm,
    group_caches,
    kernel_cache,
    layer_kinds,
    startup,
)
from zlm.worker.gpu_runner import GpuRunner
from zlm.worker.gpu_sampler import GpuSampler
from zlm.worker.gpu_steps import StepSizes
from zlm.worker.gpu_tables import GpuTables
from zlm.worker.kernel_farm import Farm, compile_all, tell
from zlm.worker.kernel_variants import Recorder, current_target
from zlm.worker.parallel import Group, join
from zlm.worker.stage_runner import StageRunner

log = logging.getLogger("zlm.worker")

WARM_LOGITS = 16  # rows that every way of sampling is tried on
LAUNCH_BOUND = 2 * 10**12  # tokens times parameters that take about as long as 300 launches
PADDING_BOUND = 5 * 10**11  # and that take a third of what launching a step takes
WARM_PREFILLS = (1024, 512, 256, 128, 64)  # tokens of lone prompts whose graphs are made at start


@dataclass(frozen=True, slots=True)
class Assembled:
    """A runner and what it was put together from."""

    runner: GpuRunner
    model: registry.Model
    sampler: GpuSampler
    tables: GpuTables
    sizes: StepSizes
    samples: bool = True  # False in a stage before the last


def start(
    resolved: Resolved,
    rank: int,
    say: Callable[[str], None],
    meeting: Path = Path(),
    farm: Farm | None = None,
) -> startup.Started:
    """Load the model of *resolved* onto the GPU and make it ready; *say* is told of each phase.

    With other ranks this one meets them at the file *meeting*. All of them run the same steps from
    then on. *farm*: of ``kernel_farm.start_early``; it is closed here. Raises ConfigError or
    ModelError, naming the flag or the tensor.
    """
    config, spec = resolved.config, resolved.spec
    hashing, kernels = kernel_cache.hash_kernels(), kernel_cache.prepare()
    local = rank % config.parallel.workers_per_node  # number of the worker on its machine
    say("starting CUDA")
    device = gpu_measure.open_device(local)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # graphs cannot be captured on the default one
    group = join(device, rank, config.parallel, meeting)
    whole, resolved = resolved, shares.resolved_of_worker(resolved, rank)
    card = gpu_measure.card(device)
    capability = torch.cuda.get_device_capability(device)
    dtype = gpu_measure.compute_dtype(
        config.model.dtype, config.cache.kv_cache_dtype, spec, capability
    )
    sizes = StepSizes(resolved.max_num_seqs)
    bytes_each = dtype.itemsize
    beside = gpu_costs.spread_bytes(resolved, bytes_each, card)
    ops = select(
        device,
        dtype,
        kv_dtype=group_caches.kv_type(resolved, dtype),
        attention=config.compute.attention_backend,
        deterministic=config.compute.deterministic,
        spread=beside > 0,
        widened_bytes=gpu_costs.widened_bytes(resolved, bytes_each, card),
    )
    groups = group_caches.facts(resolved, ops.block_bytes, ops.kv_dtype)
    limits = gpu_forecast.capacities(resolved, sizes, prefill_graphs=not ops.needs_lengths)
    expected = gpu_costs.costs(resolved, card, limits, element_bytes=bytes_each)
    gpu_memory.plan(resolved, card, expected, groups)
    keep = gpu_costs.keeps_codes(resolved, bytes_each)
    form = str(dtype).removeprefix("torch.")
    if not keep and spec.weights_format == "gguf":
        log.info("the GGUF file's weights are read as %s", form)
    if beside:
        log.info("quantized weights are kept as %s too: %.1f GiB", form, beside / 2**30)
        hashing.join()  # to spread them out is the first launch
    say("loading weights")
    model = startup.load_model(whole, ops, say, keep_quantized=keep, parallel=group.parallel)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    needed = gpu_costs.costs(resolved, card, limits, element_bytes=bytes_each, weights=taken)
    plan = gpu_memory.plan(resolved, card, needed, groups)
    plan = replace(plan, blocks=group.least_blocks(plan.blocks))
    for line in plan.table():
        log.info("%s", line)
    say("allocating the KV cache")
    is_last = group.parallel.stage.is_last
    assembled = assemble(resolved, model, ops, plan.blocks.totals, device, sizes, samples=is_last)
    say("compiling kernels")
    hashing.join()
    facts = kernel_cache.facts_of(whole, rank)
    versions = f"{torch.__version__} {triton.__version__} {card.name} {form} "
    mark = kernel_cache.WarmMark(kernels, versions.encode() + facts)
    if group.any(farm is not None or not mark.is_set()):
        _compile(assembled, resolved, plan.blocks.num_blocks, farm, group, say, leads=local == 0)
    say("warming up")
    warm_up(assembled, resolved, plan.blocks.num_blocks)
    mark.set()
    kernel_cache.WarmMark(kernels, facts).set()  # what the next start looks for first
    if group.size == 1:  # ranks are not idle at the same time: what they do not do together hangs
        _use_idle_time(assembled.runner, resolved, sizes)
    for line in gpu_memory.verify(plan, gpu_measure.measured(device)):
        log.info("%s", line)
    ready = WorkerReady(rank, plan.blocks.totals, resolved.device, form)
    runner = assembled.runner if is_last else StageRunner(assembled.runner)
    return startup.Started(runner, ready, memory=plan.facts(), answers=group.answers)


def _compile(
    assembled: Assembled,
    resolved: Resolved,
    num_blocks: Sequence[int],
    farm: Farm | None,
    group: Group,
    say: Callable[[str], None],
    *,
    leads: bool,
) -> None:
    """Find the kernels that the warm-up will launch, and compile those not in the cache.

    The worker that *leads*, the first of its machine, does it for all there; what is left to the
    others are kernels of their own. A *farm* compiles what is found while more is looked for.
    """
    began, target = time.perf_counter(), current_target()
    found = None if farm is None else lambda variant: farm.add(variant, target)
    # Ranks must not skip what they do together.
    short = layer_kinds.one_of_each(assembled.model) if group.size == 1 else nullcontext()
    with Recorder(found) as recorder, short, assembled.runner.graphs.paused():
        warm_up(assembled, resolved, num_blocks, times=1)
    log.info(
        "kernels: %d in the cache, %d to be compiled", recorder.num_cached, len(recorder.variants)
    )
    if farm is not None:
        tell(len(recorder.variants), farm.finish(say), time.perf_counter() - began)
        farm.close()
    elif recorder.variants and leads:
        compile_all(recorder.variants, say)
    group.any(False)  # waits for those that lead
    left = [] if leads else recorder.missing()
    if left:
        compile_all(left, say)


def _use_idle_time(runner: GpuRunner, resolved: Resolved, sizes: StepSizes) -> None:
    """Have *runner* capture, in idle time, what the host takes longer to launch than the card.

    Those are decodes that cut the distribution (top_k, top_p, min_p), and prompts of common
    lengths, in whose graphs those of other lengths are run as well.
    """
    parameters = sum(math.prod(shape) for shape in expected_tensors(resolved.spec).values())
    common = sizes.common(resolved.max_num_batched_tokens)
    prompts = [shape for shape in common if shape.num_tokens <= LAUNCH_BOUND // parameters]
    decodes = [sizes.decodes(rows) for rows in reversed(sizes.decode_buckets)]
    for shapes, form in ((decodes, "cut"), (prompts, "draw"), (prompts, "cut")):
        runner.spare_shapes.extend((shape, form) for shape in shapes)
    runner.most_padding = PADDING_BOUND // parameters


def assemble(
    resolved: Resolved,
    model: registry.Model,
    ops: Ops,
    totals: Sequence[int],
    device: torch.device,
    sizes: StepSizes,
    *,
    samples: bool = True,
) -> Assembled:
    """Allocate the caches, tables and the sampler, and put the runner over them.

    samples: False in a stage before the last.
    """
    groups, size = resolved.kv_groups, resolved.config.cache.block_size_tokens
    vocab_size = resolved.spec.vocab_size
    tables = GpuTables(
        num_slots=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        vocab_size=vocab_size,
        num_groups=len(groups),
        block_size=size,
        device=device,
    )
    sampler = GpuSampler(
        resolved.max_num_seqs, vocab_size, sizes.max_samples, tables.tokens, device, pdl=ops.pdl
    )
    runner = GpuRunner(
        model,
        ops,
        group_caches.allocate(resolved, totals, ops, ops.kv_dtype),
        tables,
        sampler,
        group_layers=[group.layers for group in groups],
        windows=[group.window_tokens for group in groups],
        vocab_size=vocab_size,
        sizes=sizes,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        captured_tokens=gpu_forecast.largest_captured(resolved, sizes).prefill_tokens,
        eager=resolved.config.compute.enforce_eager,
        samples=samples,
    )
    return Assembled(runner, model, sampler, tables, sizes, samples)


def warm_up(
    assembled: Assembled, resolved: Resolved, num_blocks: Sequence[int], *, times: int = 2
) -> None:
    """Run a step as large as steps get, all ways of sampling, and the commonest shapes.

    The largest shape there is comes first, and of those that are captured the largest: whatever the
    order in which others come, they find their memory in that of its tensors. The second of *times*
    runs of a shape captures it. What this leaves in caches and tables is undone.
    """
    runner, sampler, tables = assembled.runner, assembled.sampler, assembled.tables
    began = time.perf_counter()
    blocks = _Blocks(resolved, num_blocks, samples=assembled.samples)
    budget = resolved.max_num_batched_tokens
    runner.rehearse(assembled.sizes.largest(budget))
    runner.rehearse(gpu_forecast.largest_captured(resolved, assembled.sizes))
    runner.execute(blocks.prefill(budget, min(resolved.max_num_seqs, budget // 2)))
    maximal = time.perf_counter()
    device = tables.tokens.device
    logits = torch.zeros(WARM_LOGITS, resolved.spec.vocab_size, device=device)
    gpu_sampler_warm.warm(sampler, logits)
    sampled = time.perf_counter()
    prompts = [n for n in WARM_PREFILLS if n <= min(budget, resolved.max_model_len - 1)]
    steps = [blocks.prefill(tokens, 1) for tokens in prompts]
    steps += [blocks.decodes(rows) for rows in reversed(assembled.sizes.decode_buckets)]
    for step in steps:
        for _ in range(times):
            runner.execute(step)
    # The null block still is all zeros: copied over the blocks used, it clears them.
    runner.copy_blocks([(group, 0, block) for group, block in sorted(blocks.used)])
    tables.reset()
    log.info(
        "warm-up: maximal step %.2f s, sampling %.2f s, %d graphs %.2f s",
        maximal - began,
        sampled - maximal,
        len(runner.graphs),
        time.perf_counter() - sampled,
    )


class _Blocks:
    """Makes steps for the warm-up; sequences share blocks where there are too few."""

    def __init__(
        self, resolved: Resolved, num_blocks: Sequence[int], *, samples: bool = True
    ) -> None:
        self._resolved = resolved
        self._usable = min(num_blocks)
        self._samples = int(samples)
        self._size = resolved.config.cache.block_size_tokens
        self.used: set[tuple[int, int]] = set()  # (group, block)

    def prefill(self, tokens: int, rows: int) -> Execute:
        """Return a step of *rows* prompts of *tokens* tokens in all, as far as they may be long."""
        each = max(1, min(tokens // max(rows, 1), self._resolved.max_model_len - 1))
        return self._step([(slot, 0, each, self._samples) for slot in range(max(rows, 1))])

    def decodes(self, rows: int) -> Execute:
        """Return a step of *rows* decodes."""
        return self._step([(slot, 0, 1, self._samples) for slot in range(rows)])

    def _step(self, rows: list[tuple[int, int, int, int]]) -> Execute:
        joins, table = [], []
        for slot, _, count, _ in rows:
            ids = np.zeros(count, np.int32).tobytes()
            joins.append(Join(slot, ids, count, SamplingSpec(seed=0, temperature=0.0)))
            needed = -(-count // self._size)
            for index in range(needed):
                block = 1 + (slot * needed + index) % self._usable
                for group in range(len(self._resolved.kv_groups)):
                    table.append((group, slot, index, block))
                    self.used.add((group, block))
        return startup.step_message(rows, joins, table)
