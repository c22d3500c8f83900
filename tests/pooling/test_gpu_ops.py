"""Vectors computed with the GPU backend's operations (in Triton's interpreter) equal the CPU's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter
from pooled_engine import PooledEngine
from tiny_embedders import tiny_embedder

triton_interpreter.enable()

from zlm.ops.gpu import GpuOps  # noqa: E402


@pytest.mark.parametrize("family", ["bert", "modernbert", "nomic", "gemma3", "llama"])
def test_gpu_operations(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.wide_programs(monkeypatch)
    sizes: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "gemma3":
        sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = tiny_embedder(tmp_path / "m", family, modules=("mean", "normalize"), **sizes)
    prompts = [[5, 6, 7], [9], list(range(10, 24))]
    expected = PooledEngine(folder, max_model_len=32, max_num_seqs=4).pool(prompts)
    ops = GpuOps(torch.device("cpu"), torch.float32)
    monkeypatch.setattr("zlm.worker.pooling_startup.select", lambda *_, **__: ops)
    found = PooledEngine(folder, max_model_len=32, max_num_seqs=4).pool(prompts)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < 1e-5
