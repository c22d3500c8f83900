"""Weights made on the GPU: those of files equal the CPU's to the bit, random ones are random."""

from pathlib import Path

import numpy as np
import pytest
import torch
from specs import small_spec

from zlm.models.config import load_spec
from zlm.weights import gguf_dequant
from zlm.weights.load import open_weights
from zlm.worker.dummy_weights import STANDARD_DEVIATION, DummyWeights

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("name", list(gguf_dequant.BLOCKS))
def test_dequantisation_is_the_cpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, block_bytes, _ = gguf_dequant.BLOCKS[name]
    raw = np.random.default_rng(7).integers(0, 256, (999, block_bytes), dtype=np.uint8)
    raw[:, 1::2] &= 0x3B  # no scale is infinite or NaN, wherever scales stand
    on_cpu = torch.from_numpy(raw).view(-1)
    expected = torch.empty(999 * values)
    gguf_dequant.dequantize(on_cpu, name, expected)
    monkeypatch.setattr(gguf_dequant, "GPU_PIECE_VALUES", 1 << 16)
    got = torch.empty(999 * values, device=CUDA)
    gguf_dequant.dequantize(on_cpu.to(CUDA), name, got)
    assert torch.equal(got.cpu().nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_a_file_gives_the_same_on_the_gpu(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    spec = load_spec(str(path))
    on_cpu, on_gpu = open_weights(path, spec), open_weights(path, spec, CUDA)
    for name in on_cpu.names():
        got = on_gpu.get(name)
        assert got.device == CUDA
        assert torch.equal(got.cpu(), on_cpu.get(name)), name
    on_cpu.close()
    on_gpu.close()


def test_dummy_weights_are_drawn_on_the_gpu() -> None:
    spec = small_spec(hidden_size=512, intermediate_size=1024)
    name = "model.layers.0.mlp.up_proj.weight"
    first = DummyWeights(spec, 3, CUDA).get(name)
    assert first.device == CUDA and first.dtype == torch.float32
    assert torch.equal(first, DummyWeights(spec, 3, CUDA).get(name))
    assert not torch.equal(first, DummyWeights(spec, 4, CUDA).get(name))
    assert first.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.01)
    assert DummyWeights(spec, 3, CUDA).get("model.norm.weight").device == CUDA
