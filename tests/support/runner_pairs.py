"""The GPU's runner and the CPU's side by side: same model, same messages, answers that must agree.

Needs Triton: on a card, or in the interpreter (``triton_interpreter.enable`` before the import).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from runner_tables import Tables
from worker_steps import entries_of, join, masks_of, tokens_of

from zlm.config import (
    ComputeOptions,
    Config,
    ModelOptions,
    ModelSpec,
    Resolved,
    SchedulerOptions,
    resolve,
)
from zlm.messages import Join
from zlm.models import registry
from zlm.ops.cpu import CpuOps
from zlm.ops.gpu import GpuOps
from zlm.ops.select import select
from zlm.worker import gpu_startup
from zlm.worker.gpu_startup import Assembled
from zlm.worker.gpu_steps import StepSizes
from zlm.worker.model_runner import ModelRunner
from zlm.worker.slots import SlotTables

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """What the runners of a test have room for, and how the GPU's computes."""

    max_num_seqs: int = 6
    max_num_batched_tokens: int = 64
    max_model_len: int = 96
    num_blocks: int = 40  # in each KV group
    device: str = "cpu"  # in the interpreter, or "cuda"
    dtype: str = "float32"  # the CPU computes in float32
    attention: str = "triton"
    deterministic: bool = False
    eager: bool = False


class Pair(Tables):
    """Both runners over float32: every message goes to both, and their answers must agree."""

    def __init__(self, gpu: Any, cpu: ModelRunner, num_groups: int) -> None:
        super().__init__(num_groups)
        self.gpu, self.cpu = gpu, cpu

    def step(
        self,
        rows: list[tuple[int, int, int, int]],
        joins: Sequence[Join] = (),
        copies: Sequence[tuple[int, int, int]] = (),
        masks: dict[int, list[int]] | None = None,
    ) -> list[int]:
        """Run *rows* of (slot, start, count, sample) on both and return what was sampled.

        *masks*: the ids that sampling rows may only use, by their number.
        """
        message = self.message(rows, joins, copies)
        told = None
        if masks is not None:
            message = msgspec.structs.replace(message, masked=True)
            told = masks_of(message.step, masks)
        got, wanted = self.gpu.execute(message, told), self.cpu.execute(message, told)
        assert tokens_of(got) == tokens_of(wanted)
        assert got.status == wanted.status and got.step == wanted.step
        for mine, theirs in (
            (got.logprobs, wanted.logprobs),
            (got.prompt_logprobs, wanted.prompt_logprobs),
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                for name in ("rows", "counts", "ranks", "ids"):
                    assert getattr(mine, name) == getattr(theirs, name), name
                values = (np.frombuffer(c.values, np.float32) for c in (mine, theirs))
                np.testing.assert_allclose(*values, atol=1e-4)
        return tokens_of(got)


def resolved_for(spec: ModelSpec, setting: Setting, **parts: Any) -> Resolved:
    """Return the configuration of *setting*; *parts* are further parts of ``Config``."""
    config = Config(
        model=ModelOptions(
            model="m",
            load_format="dummy",
            dtype=setting.dtype,
            max_model_len=setting.max_model_len,
        ),
        scheduler=SchedulerOptions(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
        ),
        compute=ComputeOptions(
            enforce_eager=setting.eager,
            deterministic=setting.deterministic,
            attention_backend=setting.attention,  # type: ignore[arg-type]
        ),
        **parts,
    )
    return resolve(config, spec, model_path="m", tokenizer_path="m", device=setting.device)


def cpu_runner(
    resolved: Resolved, weights: registry.Weights, num_blocks: int, max_num_seqs: int
) -> ModelRunner:
    """Return the CPU's runner of the model, in float32."""
    spec, ops = resolved.spec, CpuOps(torch.float32)
    size = resolved.config.cache.block_size_tokens
    model = registry.build(spec, weights, ops=ops, max_model_len=resolved.max_model_len)
    caches = {
        layer: ops.allocate_cache(num_blocks, size, g.num_kv_heads, g.head_dim, torch.float32)
        for g in resolved.kv_groups
        for layer in g.layers
    }
    tables = SlotTables(
        num_slots=max_num_seqs,
        max_model_len=resolved.max_model_len,
        vocab_size=spec.vocab_size,
        num_groups=len(resolved.kv_groups),
        block_size=size,
        device=CPU,
    )
    return ModelRunner(
        model,
        [caches[layer] for layer in sorted(caches)],
        tables,
        group_layers=[group.layers for group in resolved.kv_groups],
        windows=[group.window_tokens for group in resolved.kv_groups],
        block_size=size,
        vocab_size=spec.vocab_size,
    )


def assembled(resolved: Resolved, weights: registry.Weights, setting: Setting) -> Assembled:
    """Return the GPU's runner of the model, with what it was put together from."""
    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    make = GpuOps if device.type == "cpu" else select  # the interpreter, or what suits the card
    ops = make(device, dtype, attention=setting.attention, deterministic=setting.deterministic)
    model = registry.build(resolved.spec, weights, ops=ops, max_model_len=resolved.max_model_len)
    totals = [setting.num_blocks] * len(resolved.kv_groups)
    sizes = StepSizes(setting.max_num_seqs)
    return gpu_startup.assemble(resolved, model, ops, totals, device, sizes)


def regrets(cpu: ModelRunner, prompt: list[int], answer: list[int], num_groups: int) -> list[float]:
    """Return by how much the CPU prefers its best token to each of *answer*, in log-probability.

    All tokens before it are those of *prompt* and *answer*: one step on the CPU judges them all.
    """
    tokens = prompt + answer
    rows = [(0, 0, len(tokens), 0)]
    message = Tables(num_groups).message(rows, [join(0, tokens, prompt_logprobs=1)])
    columns = cpu.execute(message).prompt_logprobs
    judged = entries_of(columns)[len(prompt) - 1 :]
    assert len(judged) == len(answer)
    return [max(values) - values[0] for _, _, _, values in judged]
