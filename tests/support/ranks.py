"""Several ranks: what they answer, compared with one alone, and how a server loses one of them."""

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from fault_load import start_load
from running_server import Server, eventually_true

from zlm import LLM, SamplingParams, StructuredOutputsParams

RECOVERY_SECONDS = 120.0
PROMPTS = [
    "The quick brown fox",
    "What is the capital of France? " * 8,
    "once upon a time",
    "1, 2, 3, 4, 1, 2, 3, 4,",
    "Say:",
]
FORM = StructuredOutputsParams(regex="[a-z]{4} [0-9]{3}")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, max_tokens=16, presence_penalty=0.5),
    SamplingParams(temperature=1, seed=1, max_tokens=24, structured_outputs=FORM),
]
if importlib.util.find_spec("llguidance") is None:  # a machine with GPUs may lack it
    del PROMPTS[-1], PARAMS[-1]
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,  # the long prompt is prefilled in chunks
}
MANY_BLOCKS, FEW_BLOCKS = 200, 10  # of the KV cache: with few of them sequences are preempted

Tokens = list[list[list[int]]]  # of each prompt's samples


def answers(path: Path, ranks: int, num_blocks: int = MANY_BLOCKS, **keywords: Any) -> Tokens:
    """Return the tokens of PROMPTS; a second time, with the first's prefixes, they are the same."""
    limits = {**LIMITS, "num_gpu_blocks_override": num_blocks, **keywords}
    began = time.monotonic()
    with LLM(str(path), tensor_parallel_size=ranks, **limits) as llm:
        first, second = (
            [
                [list(sample.token_ids) for sample in output.outputs]
                for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            ]
            for _ in range(2)
        )
        preemptions = llm.stats().preemptions
    print(f"{ranks} ranks, {keywords}: {time.monotonic() - began:.1f} s", flush=True)
    assert (preemptions > 0) == (num_blocks == FEW_BLOCKS)
    assert first == second
    return first


def survives(server: Server, number: int) -> None:
    """Signal rank 1 of two under load: the engine comes down and up again, and answers as before.

    *server* serves a tiny model as ``smol``.
    """
    before = server.complete([1, 2, 3]).text
    opened = start_load(server)
    workers = [pid for pid, line in server.pids().items() if "zlm.worker.process" in line]
    assert len(workers) == 2
    rank_1 = next(pid for pid in workers if server.pids()[pid].split()[-1] == "1")
    os.kill(rank_1, number)
    outcomes = {request.outcome() for request in opened}
    assert outcomes <= {"error", "done"}
    assert eventually_true(lambda: not set(workers) & set(server.pids()), 30)
    assert eventually_true(lambda: server.health() == 200, RECOVERY_SECONDS), (
        server.log.read_text()[-4000:]
    )
    assert server.complete([1, 2, 3]).text == before
