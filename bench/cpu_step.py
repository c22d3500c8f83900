"""Milliseconds of one model step on the CPU, by rows, tokens a row and context.

    python bench/cpu_step.py MODEL [--dtype float32 | --quantized] [--threads 2] [--torch-only]
        [--profile]

MODEL is a local folder or GGUF file. A step is ``model.forward`` and the logits of each row's last
token, as in serving; blocks of the KV cache are scattered. Prints a table, and one JSON document as
the last line. With --profile it also prints where the time of each step goes.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from zlm.ops import cpu_process

cpu_process.prepare()  # before torch is imported, as a worker does

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from zlm.config import ModelSpec, kv_groups  # noqa: E402
from zlm.models import registry  # noqa: E402
from zlm.models.config import load_spec  # noqa: E402
from zlm.models.registry import Model  # noqa: E402
from zlm.ops import kv_cache  # noqa: E402
from zlm.ops.batch import GroupBatch, StepBatch  # noqa: E402
from zlm.ops.cpu import CpuOps  # noqa: E402
from zlm.ops.cpu_native import NativeKernels  # noqa: E402
from zlm.weights.load import GGUFWeights, open_weights  # noqa: E402
from zlm.worker import native_build  # noqa: E402

BLOCK_SIZE = 16
MEASURE_SECONDS = 2.0
SHAPES = [  # rows, tokens a row, context after the step
    (1, 1, 200),
    (1, 1, 2000),
    (4, 1, 200),
    (8, 1, 200),
    (16, 1, 200),
    (32, 1, 200),
    (64, 1, 200),
    (1, 128, 128),
    (4, 128, 128),
    (1, 512, 512),
    (1, 512, 1900),
]


def step_batch(
    spec: ModelSpec, rows: int, tokens: int, context: int, num_blocks: int, seed: int = 0
) -> StepBatch:
    """Return a step of *rows* rows of *tokens* tokens each, whose sequences have scattered blocks.

    Contexts differ from row to row by up to a fifth, as they do in serving, if the step decodes.
    """
    chance = random.Random(seed)
    contexts = [context - (chance.randrange(context // 5 + 1) if tokens == 1 and rows > 1 else 0)]
    contexts += [
        context - (chance.randrange(context // 5 + 1) if tokens == 1 else 0)
        for _ in range(rows - 1)
    ]
    width = -(-max(contexts) // BLOCK_SIZE)
    positions = torch.cat([torch.arange(c - tokens, c) for c in contexts])
    row_of = torch.arange(rows).repeat_interleave(tokens)
    groups = []
    for group in kv_groups(spec):
        blocks = chance.sample(range(1, num_blocks), rows * width)
        table = torch.tensor(blocks, dtype=torch.int32).view(rows, width)
        slots = table[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE
        groups.append(GroupBatch(slots + positions % BLOCK_SIZE, table, group.window_tokens))
    return StepBatch(
        token_ids=torch.randint(10, spec.vocab_size, (rows * tokens,)),
        positions=positions,
        query_starts=torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        num_decodes=rows if tokens == 1 else 0,
        query_lens=[tokens] * rows,
        context_lens=contexts,
        groups=groups,
    )


def milliseconds(function: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the least time of *function*, in ms, over MEASURE_SECONDS."""
    for _ in range(3):
        function()
    times: list[float] = []
    end = time.perf_counter() + MEASURE_SECONDS
    while time.perf_counter() < end or len(times) < 5:
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times), min(times)


def measure(
    model: Model, spec: ModelSpec, caches: list[torch.Tensor], num_blocks: int, with_profile: bool
) -> list[dict[str, float]]:
    """Time every shape; print a line for each."""
    results = []
    print(f"{'rows':>5}{'tokens':>8}{'context':>9}{'median ms':>11}{'least ms':>10}{'tok/s':>9}")
    for rows, tokens, context in SHAPES:
        if context > spec.max_position:
            continue
        batch = step_batch(spec, rows, tokens, context, num_blocks)
        last = (batch.query_starts[1:] - 1).long()

        def step(batch: StepBatch = batch, last: torch.Tensor = last) -> torch.Tensor:
            return model.logits(model.forward(batch, caches).index_select(0, last))

        median, least = milliseconds(step)
        rate = rows * tokens / median * 1e3
        print(
            f"{rows:>5}{tokens:>8}{context:>9}{median:>11.2f}{least:>10.2f}{rate:>9.0f}", flush=True
        )
        results.append(
            {"rows": rows, "tokens": tokens, "context": context, "ms": median, "least_ms": least}
        )
        if with_profile:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                for _ in range(3):
                    step()
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quantized", action="store_true", help="keep a GGUF file's codes")
    parser.add_argument("--torch-only", action="store_true", help="without zlm's own kernels")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.quantized:
        arguments.dtype = "bfloat16"
    dtype = getattr(torch, arguments.dtype)
    spec = load_spec(arguments.model)
    began = time.perf_counter()
    weights = open_weights(arguments.model, spec)
    matrix = None
    if arguments.quantized:
        assert isinstance(weights, GGUFWeights), "--quantized needs a GGUF file"
        matrix = weights.matrix
    library = None if arguments.torch_only else native_build.library()
    native = None if library is None else NativeKernels(library)
    ops = CpuOps(dtype, quantized=arguments.quantized, native=native)
    longest = min(spec.max_position, 8192)
    model = registry.build(spec, weights, ops=ops, max_model_len=longest, quantized=matrix)
    load_seconds = time.perf_counter() - began
    cpu_process.keep_freed_memory()
    num_blocks = 1 + max(rows * -(-context // BLOCK_SIZE) for rows, _, context in SHAPES)
    caches = [
        kv_cache.allocate(
            num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, dtype, "cpu"
        ).normal_()
        for _ in range(spec.num_layers)
    ]
    print(f"loaded in {load_seconds:.2f} s, {arguments.threads} threads, {arguments.dtype}")
    with torch.inference_mode():
        steps = measure(model, spec, caches, num_blocks, arguments.profile)
    print(
        json.dumps(
            {
                "model": arguments.model,
                "dtype": arguments.dtype,
                "quantized": arguments.quantized,
                "native": native is not None,
                "threads": arguments.threads,
                "load_seconds": load_seconds,
                "steps": steps,
            }
        )
    )


if __name__ == "__main__":
    main()
