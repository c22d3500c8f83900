"""One ``LLM`` on SmolLM2 in float32 for the whole session; one thread, as tests run beside it."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

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
