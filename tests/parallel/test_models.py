"""Models shared out to 2 and 4 ranks compute what one rank does, family by family."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_steps import run, sequences
from msgspec.structs import replace
from paged_steps import PagedSequences
from thread_ranks import on_ranks
from tiny import tiny_checkpoint
from tiny_models import SPECS
from tiny_quantized import FORMS, UNEVEN, quantized, with_mxfp4

from zlm.config import ModelSpec
from zlm.models import registry, shares
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.ops.parallel import ALONE, Parallel
from zlm.weights.load import open_weights
from zlm.worker.startup import KEEPING


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_logits(name: str, ranks: int) -> None:
    spec = SPECS[name]
    expected = run(spec, sequences(spec, CpuOps(torch.float32)))
    found = on_ranks(ranks, lambda parallel: _logits(spec, parallel))
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, found[0]), "ranks sample the same only from the same bits"


def _logits(spec: ModelSpec, parallel: Parallel) -> torch.Tensor:
    return run(spec, sequences(spec, CpuOps(torch.float32), parallel=parallel))


def test_a_vocabulary_that_no_number_divides() -> None:
    spec = replace(SPECS["qwen2"], vocab_size=33)
    expected = run(spec, sequences(spec, CpuOps(torch.float32)))
    for logits in on_ranks(4, lambda parallel: _logits(spec, parallel)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "ranks"), [*((form, 2) for form in FORMS), ("mxfp4", 3), ("mxfp4", 4)]
)
def test_quantized_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path, form: str, ranks: int
) -> None:
    """Dequantized in float32, and as codes in bfloat16, whose blocks are cut with them; a CPU's
    products of experts are none of codes.
    """
    if form == "mxfp4":
        folder = tiny_checkpoint(tmp_path / "model", "gpt_oss", tokenizer=False, **UNEVEN)
        with_mxfp4(folder)
    else:
        folder = quantized(checkpoint("llama"), tmp_path / "model", form)
    spec = load_spec(folder)

    def logits(parallel: Parallel, keeps: bool) -> torch.Tensor:
        narrow = keeps and form != "mxfp4"
        ops = CpuOps(torch.bfloat16 if narrow else torch.float32, quantized=keeps)
        weights = open_weights(folder, spec)
        assert isinstance(weights, KEEPING)
        matrix = weights.matrix if keeps else None
        model = registry.build(
            spec, weights, ops=ops, max_model_len=128, quantized=matrix, parallel=parallel
        )
        own = shares.spec_of_rank(spec, parallel.size)
        runner = PagedSequences(model, own, num_blocks=60, block_size=4, ops=ops, dtype=ops.dtype)
        return run(spec, runner)

    for keeps, tolerance in ((False, 1e-4), (True, 1e-4 if form == "mxfp4" else 0.1)):
        expected = logits(ALONE, keeps)
        for found in on_ranks(ranks, lambda parallel, keeps=keeps: logits(parallel, keeps)):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
