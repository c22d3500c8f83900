"""Dequantisation: equal to the bit with the gguf package, on random blocks and on real files."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from zlm.weights import gguf_dequant, gguf_matrix
from zlm.weights.gguf import READABLE, GGUFFile


def same_bits(ours: torch.Tensor, reference: np.ndarray) -> bool:
    """Compare bit patterns; where the reference is NaN any NaN will do."""
    flat = ours.numpy().reshape(-1)
    reference = np.ascontiguousarray(reference, np.float32).reshape(-1)
    nan = np.isnan(reference)
    equal = flat.view(np.uint32) == reference.view(np.uint32)
    return bool(equal[~nan].all() and np.isnan(flat[nan]).all())


@pytest.mark.parametrize("name", READABLE)
def test_random_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_dequant, "PIECE_VALUES", 1 << 12)  # several pieces, the last one short
    kind = gguf.GGMLQuantizationType[name]
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(7).integers(0, 256, 2500 * block_bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        reference = gguf.dequantize(raw, kind)
    out = torch.full((reference.size,), torch.nan)
    gguf_dequant.dequantize(torch.from_numpy(raw), name, out)
    assert same_bits(out, reference)


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_real_tensors(fixture: str, request: pytest.FixtureRequest) -> None:
    """Two tensors of each type and shape that a real file holds, the big embedding left out."""
    path: Path = request.getfixturevalue(fixture)
    seen: dict[tuple, int] = {}
    for info in GGUFFile(path).tensors.values():
        key = (info.type, info.shape)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 2 or info.num_bytes > 2 << 20:
            continue
        raw = np.fromfile(path, np.uint8, info.num_bytes, offset=info.offset)
        out = torch.empty(info.shape)
        gguf_dequant.dequantize(torch.from_numpy(raw), info.type, out)
        reference = gguf.dequantize(raw, gguf.GGMLQuantizationType[info.type])
        assert same_bits(out, reference), info
    assert {kind for kind, _ in seen} >= {"F32", "Q8_0"}


@pytest.mark.parametrize("name", gguf_matrix.PARTS)
def test_codes_stand_for_the_same_values(name: str) -> None:
    """As ``BlockMatrix``: what is computed from codes, scales and offsets, a row of blocks each."""
    values, block_bytes, _ = gguf_dequant.BLOCKS[name]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (12, block_bytes), dtype=np.uint8)
    factors = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    for at in (0, 2) if name in ("Q4_K", "Q5_K") else factors.get(name, (0,)):
        raw[:, at : at + 2] = rng.random((12, 1), np.float32).astype(np.float16).view(np.uint8)
    encoded = torch.from_numpy(raw.reshape(-1))
    matrix = gguf_matrix.matrix(encoded, name, (3, 4 * values))
    expected = torch.empty(3, 4 * values)
    gguf_dequant.dequantize(encoded, name, expected)
    torch.testing.assert_close(matrix.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-4)
