"""SmolLM2's own 4 bits: a text is as likely to it as in float32, within 3 %."""

import math
from pathlib import Path

import pytest
import torch
from paged_steps import PagedSequences

from zlm.config import ModelSpec
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_quantized import FEW_ROWS, is_usable
from zlm.tokenizer.load import load_vocabulary
from zlm.weights.load import GGUFWeights

TEXT = Path(__file__).parent.parent / "clients" / "lighthouse.txt"
NUM_TOKENS = 200
MOST = 1.03  # times the perplexity in float32
MOST_DIVERGENCE = {False: 0.005, True: 0.02}  # nats a token, by *narrow*


def log_probabilities(
    spec: ModelSpec, path: Path, ids: list[int], step: int, narrow: bool = False
) -> torch.Tensor:
    """Return what follows *ids*, [T, V]: quantized, *step* tokens at a time; 0: in float32."""
    weights = GGUFWeights(path, spec)
    keeps = step > 0
    ops = CpuOps(torch.bfloat16 if keeps else torch.float32, quantized=keeps, narrow=narrow)
    quantized = weights.matrix if keeps else None
    model = registry.build(spec, weights, ops=ops, max_model_len=512, quantized=quantized)
    weights.close()
    sequences = PagedSequences(model, spec, dtype=ops.dtype, ops=ops)
    with torch.inference_mode():
        pieces = [
            sequences.step([(0, ids[at : at + (step or len(ids))])])[0].float()
            for at in range(0, len(ids), step or len(ids))
        ]
    return torch.cat(pieces).log_softmax(-1)


@pytest.mark.skipif(not is_usable(), reason="this CPU or torch lacks the products")
@pytest.mark.parametrize(
    ("step", "narrow"),
    [(FEW_ROWS, False), (NUM_TOKENS, False), (NUM_TOKENS, True)],
    ids=["4-bit", "bfloat16", "8-bit"],
)
def test_perplexity(smollm2_path: Path, step: int, narrow: bool) -> None:
    spec = load_spec(smollm2_path)
    vocabulary = load_vocabulary(str(smollm2_path))
    ids = vocabulary.encode(TEXT.read_text())[:NUM_TOKENS]
    exact = log_probabilities(spec, smollm2_path, ids, 0)
    rounded = log_probabilities(spec, smollm2_path, ids, step, narrow)
    targets = torch.tensor(ids[1:])
    losses = [-each[:-1].gather(1, targets[:, None]).mean() for each in (exact, rounded)]
    assert math.exp(losses[1] - losses[0]) < MOST
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert divergence < MOST_DIVERGENCE[narrow]
