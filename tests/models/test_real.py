"""The real checkpoints against transformers, in float32: logits, and greedy continuations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_steps import PagedSequences

from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.weights.load import open_weights

NEW_TOKENS = 24
PROMPTS = [list(range(1000, 1040)), [504, 3575, 282, 4649, 314], [12] * 600]


class Real:
    """A checkpoint in both implementations, the transformers one loaded from the same file."""

    def __init__(self, path: Path) -> None:
        self.spec = load_spec(path)
        self.model = registry.build(
            self.spec,
            open_weights(path, self.spec),
            ops=CpuOps(torch.float32),
            max_model_len=1024,
        )
        self.reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()


@pytest.fixture(scope="module", params=["smollm2_path", "gemma3_path"])
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    yield Real(request.getfixturevalue(request.param))


def test_logits_and_greedy_tokens(real: Real) -> None:
    """All prompts at once, in chunks, then decoded together."""
    sequences = PagedSequences(real.model, real.spec, num_blocks=160)
    chunk, done = 100, [0] * len(PROMPTS)
    last: list[torch.Tensor] = [torch.empty(0)] * len(PROMPTS)
    while any(d < len(p) for d, p in zip(done, PROMPTS, strict=True)):
        rows = [(i, p[done[i] : done[i] + chunk]) for i, p in enumerate(PROMPTS)]
        rows = [row for row in rows if row[1]]
        for (i, ids), logits in zip(rows, sequences.step(rows), strict=True):
            done[i], last[i] = done[i] + len(ids), logits[-1]
    generated: list[list[int]] = [[] for _ in PROMPTS]
    seen: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    for _ in range(NEW_TOKENS):
        for i, logits in enumerate(last):
            seen[i].append(logits)
            generated[i].append(int(logits.argmax()))
        rows = [(i, ids[-1:]) for i, ids in enumerate(generated)]
        last = [logits[-1] for logits in sequences.step(rows)]
    for prompt, ids, logits in zip(PROMPTS, generated, seen, strict=True):
        with torch.inference_mode():
            inputs = torch.tensor([prompt + ids[:-1]])
            expected = real.reference(input_ids=inputs).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-3, atol=2e-3)
        assert ids == expected.argmax(-1).tolist()
