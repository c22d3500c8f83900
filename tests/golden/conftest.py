"""Real checkpoints, answers to ``real_prompts``, and transformers in float32 to compare with.

transformers gets the token ids that zlm made of the texts, so tokenizers do not matter here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import real_prompts
import torch
from transformers import AutoModelForCausalLM
from transformers_reference import Reference

from zlm import LLM, SamplingParams
from zlm.outputs import RequestOutput


@dataclass(frozen=True)
class Checkpoint(Reference):
    """A checkpoint and its transformers model."""

    path: Path


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return Checkpoint(model.eval(), path)


@pytest.fixture(scope="session")
def open_llm(checkpoint: Checkpoint) -> Callable[..., LLM]:
    """Make an LLM of the checkpoint with the options that all tests share, and more."""
    limits = {**real_prompts.LIMITS, "cpu_threads": 1}  # other tests run beside these
    return partial(LLM, str(checkpoint.path), dtype="float32", **limits)


@pytest.fixture(scope="session")
def llm(open_llm: Callable[..., LLM]) -> Iterator[LLM]:
    """The checkpoint with a large step budget, a prefix cache, and room for everything."""
    with open_llm(max_num_batched_tokens=2048) as llm:
        yield llm


@pytest.fixture(scope="session")
def greedy() -> SamplingParams:
    return real_prompts.greedy()


@pytest.fixture(scope="session")
def alone(llm: LLM, greedy: SamplingParams) -> list[RequestOutput]:
    """The greedy answer to each prompt, one after another, none in company."""
    return real_prompts.one_by_one(llm, real_prompts.TEXTS, greedy)
