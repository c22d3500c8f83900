"""Twenty prompts, real checkpoints, and transformers in float32 to compare with.

transformers gets the token ids that zlm made of the texts, so tokenizers do not matter here. Its
greedy continuation of a prompt P is D exactly if, for each k, the likeliest token after P + D[:k]
is D[k]; all k are seen in one forward pass over P + D, without padding or a cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from zlm import LLM, SamplingParams
from zlm.outputs import RequestOutput

STORY = """\
The lighthouse keeper had not spoken to anyone for eleven days when the boat came in. He watched it
from the gallery, a small grey thing that climbed each wave as if it might not come down again, and
he counted the people in it: three, then two, then three once more as someone rose from the bottom
of the hull with a rope. He went down the stairs slowly. There were one hundred and ninety-two of
them, and he had painted every second one white so that he could find his way in the dark. """

TEXTS = [
    STORY,
    "Summary of the text below.\n\n" + STORY * 2 + "\n\nSummary:",
    "She opened the letter and read it twice. " * 24,
    STORY * 6 + "At the bottom he",  # longer than Gemma 3's sliding window of 512 tokens
    "The",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at 100 degrees Celsius and freezes at",
    "Once upon a time there was a girl who lived at the edge of a forest. Every morning she",
    "Q: What is the capital of Italy?\nA:",
    "The days of the week are Monday, Tuesday,",
    "import numpy as np\n\ndef mean(values):\n    total = 0\n    for value in values:\n       ",
    "Dear Sir or Madam,\n\nI am writing to complain about the train that",
    "Zürich liegt in der Schweiz, Wien in Österreich und Berlin in",
    "A recipe for bread: 500 g flour, 350 g water, 10 g salt, 5 g yeast. First,",
    "| name | age |\n|---|---|\n| Ann | 31 |\n| Bob | 29 |\n|",
    "Roses are red, violets are blue,",
    '{"name": "Alice", "email": "alice@example.com", "address": {"street": "',
    "To be, or not to be, that is the question:",
]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its transformers model."""

    path: Path
    model: Any

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return transformers' float32 logits after each of *token_ids*: [T, V]."""
        return self.model(torch.tensor([token_ids])).logits[0].float()


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return Checkpoint(path, model.eval())


@pytest.fixture(scope="session")
def open_llm(checkpoint: Checkpoint) -> Callable[..., LLM]:
    """Make an LLM of the checkpoint with the options that all tests share, and more."""
    common = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16}
    return partial(LLM, str(checkpoint.path), **common)


@pytest.fixture(scope="session")
def llm(open_llm: Callable[..., LLM]) -> Iterator[LLM]:
    """The checkpoint with a large step budget, a prefix cache, and room for everything."""
    with open_llm(max_num_batched_tokens=2048) as llm:
        yield llm


@pytest.fixture(scope="session")
def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="session")
def alone(llm: LLM, greedy: SamplingParams) -> list[RequestOutput]:
    """The greedy answer to each prompt, one after another, none in company."""
    return [llm.generate(text, greedy, use_tqdm=False)[0] for text in TEXTS]
