"""Rows of an embedding that stays in its file."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny import finish_gguf

from zlm.errors import ModelError
from zlm.ops.cpu import CpuOps
from zlm.weights import gguf_rows
from zlm.weights.gguf import GGUFFile
from zlm.weights.gguf_matrix import matrix
from zlm.weights.gguf_rows import FileRows

NAME = "token_embd.weight"


def written(path: Path, kind: str) -> GGUFFile:
    """Return a file of gguf's own writer with 40 rows of 64, quantized by it."""
    values = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", values[:1])
    writer.add_tensor(NAME, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    finish_gguf(writer)
    return GGUFFile(path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_rows_are_those_of_the_tensor(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    info = written(path, kind).tensors[NAME]
    raw = torch.from_numpy(np.fromfile(path, np.uint8))[info.offset :][: info.num_bytes]
    whole = matrix(raw, info.type, info.shape).dequantize(torch.float32)
    ids = torch.tensor([39, 0, 7, 7])
    embedding = CpuOps(torch.float32).embedding(FileRows(str(path), info), 2.0, torch.float32)
    assert torch.equal(embedding(ids), whole[ids] * 2)


def test_only_large_ones_are_read_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = written(tmp_path / "model.gguf", "Q8_0").tensors
    assert not FileRows.takes(tensors[NAME])
    monkeypatch.setattr(gguf_rows, "LEAST_BYTES", 100)
    assert FileRows.takes(tensors[NAME]) and not FileRows.takes(tensors["before"])


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    """An error, where a mapping of the file would end the process by a signal."""
    path = tmp_path / "model.gguf"
    info = written(path, "Q8_0").tensors[NAME]
    rows = FileRows(str(path), info)
    os.truncate(path, info.offset + 100)
    with pytest.raises(ModelError, match=r"model\.gguf has been cut short while it was in use"):
        rows.rows(torch.tensor([0, 5]))
