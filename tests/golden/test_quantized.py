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
from zlm.ops.cpu_codes import MOST_ROWS
from zlm.ops.cpu_native import NativeKernels
from zlm.ops.cpu_quantized import FEW_ROWS, is_usable
from zlm.tokenizer.load import load_vocabulary
from zlm.weights.load import GGUFWeights

TEXT = Path(__file__).parent.parent / "clients" / "lighthouse.txt"
NUM_TOKENS = 200
MOST = 1.03  # times the perplexity in float32
# Nats a token: of torch's products, by *narrow*, and of ours with codes.
MOST_DIVERGENCE, MOST_OF_CODES = {False: 0.005, True: 0.02}, 0.001


def log_probabilities(
    spec: ModelSpec,
    path: Path,
    ids: list[int],
    step: int,
    narrow: bool = False,
    native: NativeKernels | None = None,
) -> torch.Tensor:
    """Return what follows *ids*, [T, V]: quantized, *step* tokens at a time; 0: in float32."""
    weights = GGUFWeights(path, spec)
    keeps = step > 0
    dtype = torch.bfloat16 if keeps else torch.float32
    ops = CpuOps(dtype, quantized=keeps, narrow=narrow, native=native)
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
    assert check(smollm2_path, step, narrow) < MOST_DIVERGENCE[narrow]


@pytest.mark.skipif(not is_usable(), reason="this CPU or torch lacks the products")
@pytest.mark.parametrize(("step", "narrow"), [(MOST_ROWS, False), (NUM_TOKENS, True)])
def test_codes(smollm2_path: Path, native_kernels: NativeKernels, step: int, narrow: bool) -> None:
    if not native_kernels.has_products:
        pytest.skip("this processor lacks VNNI")
    assert check(smollm2_path, step, narrow, native_kernels) < MOST_OF_CODES


def check(path: Path, step: int, narrow: bool, native: NativeKernels | None = None) -> float:
    """See that the text is as likely; return the mean divergence of a token from float32."""
    spec = load_spec(path)
    vocabulary = load_vocabulary(str(path))
    ids = vocabulary.encode(TEXT.read_text())[:NUM_TOKENS]
    exact = log_probabilities(spec, path, ids, 0)
    rounded = log_probabilities(spec, path, ids, step, narrow, native)
    targets = torch.tensor(ids[1:])
    losses = [-each[:-1].gather(1, targets[:, None]).mean() for each in (exact, rounded)]
    assert math.exp(losses[1] - losses[0]) < MOST
    return (exact.exp() * (exact - rounded)).sum(-1).mean().item()
