"""How far the reading of weights is: told now and then, with each tensor counted once."""

from pathlib import Path

import torch
from tiny import tiny_checkpoint

from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.weights.load import open_weights
from zlm.weights.load_progress import REPORT_SECONDS, LoadProgress


def test_a_model_tells_how_much_of_it_is_read(tmp_path: Path) -> None:
    path = str(tiny_checkpoint(tmp_path / "model", "llama"))
    spec = load_spec(path)
    told: list[str] = []
    seconds = iter(range(1000))  # each look at the clock is a second after the one before
    progress = LoadProgress(told.append, lambda: float(next(seconds)))
    ops = CpuOps(torch.float32)
    weights = open_weights(path, spec)
    registry.build(spec, weights, ops=ops, max_model_len=64, on_read=progress)
    count = len(weights.names())
    assert len(told) == count // REPORT_SECONDS
    assert told[0] == f"loading weights: {100 * REPORT_SECONDS / count:.0f}%"
    assert len(set(told)) == len(told)


def test_a_tensor_that_is_read_again_is_counted_once() -> None:
    told: list[str] = []
    progress = LoadProgress(told.append, iter([0.0, 5.0, 10.0, 10.1, 15.0]).__next__)
    for name in ("a", "a", "b", "b"):
        progress(name, 4)
    assert told == ["loading weights: 25%", "loading weights: 25%", "loading weights: 50%"]
