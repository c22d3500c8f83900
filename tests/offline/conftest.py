"""One ``LLM`` on SmolLM2 in float32 for the whole session; one thread, as tests run beside it.

And a tiny checkpoint, for tests that start engines of their own.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from zlm import LLM


@pytest.fixture(scope="session")
def open_llm(smollm2_path: Path) -> Callable[..., LLM]:
    """Make an LLM of its own for a test, with the options that all share, and more."""
    limits = {"max_model_len": 512, "max_num_seqs": 16, "cpu_threads": 1}
    return partial(LLM, str(smollm2_path), dtype="float32", **limits)


@pytest.fixture(scope="session")
def llm(open_llm: Callable[..., LLM]) -> Iterator[LLM]:
    with open_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama; nine of its 320 tokens end a text: 2, 5, 45, 85, ..."""
    ends = [2, *range(5, 320, 40)]
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "m", "llama", eos_token_id=ends)
