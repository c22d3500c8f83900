"""Engines of several workers over Gloo answer token for token like one, in float32.

Prompts in chunks, prefixes found again, several samples of one, log-probabilities, penalties,
structured output, and with a small cache preemption.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import FEW_BLOCKS, MANY_BLOCKS, Tokens, answers
from tiny import tiny_checkpoint
from tiny_quantized import UNEVEN, quantized, with_mxfp4

Checkpoint = Callable[[str], Path]


@functools.cache
def alone(path: Path, num_blocks: int = MANY_BLOCKS) -> Tokens:
    """Return what one worker answers."""
    return answers(path, 1, num_blocks, device="cpu", cpu_threads=1)


def shared(path: Path, ranks: int, stages: int, num_blocks: int = MANY_BLOCKS) -> Tokens:
    """Return what *ranks* times *stages* workers answer."""
    more = {"device": "cpu", "cpu_threads": 1, "pipeline_parallel_size": stages}
    return answers(path, ranks, num_blocks, **more)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)], ids=["ranks", "stages"])
def test_two_workers(checkpoint: Checkpoint, ranks: int, stages: int) -> None:
    path = checkpoint("llama")
    assert shared(path, ranks, stages, FEW_BLOCKS) == alone(path, FEW_BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3", "qwen3", "qwen3_moe", "gpt_oss", "olmo2", "phi3", "smollm3", "llama4"],
)
def test_families(checkpoint: Checkpoint, family: str, ranks: int, stages: int) -> None:
    if (family in ("gemma3", "llama4") and stages == 3) or (family == "gpt_oss" and stages > 1):
        pytest.skip("a stage would have layers of one kind alone, which is refused")
    path = checkpoint(family)
    assert shared(path, ranks, stages) == alone(path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8-rows", "int4-groups"])
def test_quantized_weights(checkpoint: Checkpoint, tmp_path: Path, form: str) -> None:
    path = quantized(checkpoint("llama"), tmp_path / "model", form)
    assert shared(path, 4, 1) == alone(path)
    assert shared(path, 2, 2) == alone(path)


@pytest.mark.slow
def test_mxfp4_experts(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "gpt_oss", **UNEVEN)
    with_mxfp4(path)
    assert shared(path, 3, 1) == shared(path, 4, 1) == alone(path)
