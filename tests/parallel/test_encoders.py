"""Encoders shared out to ranks give the hidden states of one."""

from pathlib import Path

import pytest
import torch
from thread_ranks import on_ranks
from tiny_embedders import tiny_embedder

from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.batch import StepBatch
from zlm.ops.cpu import CpuOps
from zlm.ops.parallel import ALONE, Parallel
from zlm.weights.load import open_weights

LENGTHS = [9, 4, 17]


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "nomic"])
def test_hidden_states(family: str, tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "model", family)
    spec = load_spec(folder)
    ids = torch.randint(5, 300, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    batch = StepBatch(
        token_ids=ids,
        positions=torch.cat([torch.arange(length) for length in LENGTHS]),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int())),
        seq_lens=lengths,
        num_decodes=0,
        query_lens=LENGTHS,
        context_lens=LENGTHS,
        groups=[],
    )

    @torch.inference_mode()
    def hidden(parallel: Parallel) -> torch.Tensor:
        weights, ops = open_weights(folder, spec), CpuOps(torch.float32)
        model = registry.build(spec, weights, ops=ops, max_model_len=64, parallel=parallel)
        return model.forward(batch, [])

    expected = hidden(ALONE)
    for found in on_ranks(2, hidden):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
