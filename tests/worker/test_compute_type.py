"""The choice of compute type, threads and what memory is free."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from zlm.config import ModelOptions, ModelSpec, PoolingSpec
from zlm.errors import ConfigError
from zlm.worker import compute_type

SPEC = ModelSpec(
    architecture="llama", vocab_size=1000, hidden_size=576, intermediate_size=1536, num_layers=2,
    num_heads=9, num_kv_heads=3, head_dim=64, max_position=2048, rms_norm_eps=1e-5,
)  # fmt: skip
PLENTY = 2**34


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float32", torch.float32), ("float", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_explicit_types_are_honoured(name: str, dtype: torch.dtype) -> None:
    assert compute_type.choose(name, SPEC, free_bytes=0) is dtype


@pytest.mark.parametrize("name", ["float16", "half", "int8"])
def test_impossible_types_name_the_flag(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--dtype {name}"):
        compute_type.choose(name, SPEC, free_bytes=PLENTY)


@pytest.mark.parametrize(
    ("ratios", "dtype"),
    [
        ({1: 1.9, 8: 1.8, 128: 1.2}, torch.bfloat16),
        ({1: 2.0, 8: 2.0, 128: 0.2}, torch.float32),
        ({1: 1.0, 8: 0.2, 128: 0.15}, torch.float32),
        ({1: 1.05, 8: 1.0, 128: 1.1}, torch.float32),
    ],
    ids=["faster", "slow-prefill", "no-bf16-units", "not-worth-it"],
)
def test_auto_takes_what_was_faster(
    ratios: dict[int, float],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compute_type, "speed_ratios", lambda *_: ratios)
    with caplog.at_level(logging.INFO):
        assert compute_type.choose("auto", SPEC, free_bytes=PLENTY) is dtype
    assert f"{ratios[8]:.2f} (M=8)" in caplog.text and str(dtype)[6:] in caplog.text


def test_auto_halves_weights_that_would_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    small = compute_type.weight_bytes(SPEC, 4) - 1
    assert compute_type.choose("auto", SPEC, free_bytes=small) is torch.bfloat16
    assert "would take" in caplog.text


def test_measuring_covers_decode_and_prefill() -> None:
    ratios = compute_type.speed_ratios(576, 1536)
    assert set(ratios) == {1, 8, 128} and all(ratio > 0 for ratio in ratios.values())


def test_weight_bytes_of_a_known_model() -> None:
    """SmolLM2-135M: 134.5 million weights, tied embeddings."""
    spec = ModelSpec(
        architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536,
        num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, max_position=8192,
        rms_norm_eps=1e-5, tie_embeddings=True,
    )  # fmt: skip
    assert compute_type.weight_bytes(spec, 1) == pytest.approx(134_515_008, rel=1e-3)


def test_threads_are_physical_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_type.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9})
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert compute_type.physical_cores(tmp_path) == 3  # two cores, and one that says nothing
    with pytest.raises(ConfigError, match="--cpu-threads 0"):
        compute_type.set_threads(0)


def test_free_memory_is_bounded_by_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   4000 kB\n")
    assert compute_type.free_memory(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert compute_type.free_memory(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("1000000\n")
    assert compute_type.free_memory(tmp_path) == 999_000


@pytest.mark.parametrize(
    ("options", "changes", "keeps"),
    [
        ({}, {"weights_format": "gguf"}, True),
        ({}, {"quantization": "awq"}, True),
        ({}, {}, False),
        ({"dtype": "float32"}, {"weights_format": "gguf"}, False),
        ({"dtype": "bfloat16"}, {"weights_format": "gguf"}, False),
        ({"dtype": "bfloat16", "quantization": "gguf"}, {"weights_format": "gguf"}, True),
        ({"dtype": "float32", "quantization": "gguf"}, {"weights_format": "gguf"}, False),
        ({"load_format": "dummy"}, {"weights_format": "gguf"}, False),
        ({}, {"weights_format": "gguf", "pooling": PoolingSpec()}, False),
    ],
)
def test_quantized_weights_stay_so_where_that_is_fast(
    options: dict[str, Any],
    changes: dict[str, Any],
    keeps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_is_vnni_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setattr(compute_type.cpu_quantized, "is_usable", lambda: True)
    spec = replace(SPEC, **changes)
    model = ModelOptions(model="m", **options)
    assert compute_type.keeps_quantized(model, spec) == keeps
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert not compute_type.keeps_quantized(model, spec)


def test_the_form_for_many_rows_is_narrow_where_memory_is_short() -> None:
    both = compute_type.weight_bytes(SPEC, 3)
    assert compute_type.is_short(SPEC, 2 * both - 2)
    assert not compute_type.is_short(SPEC, 2 * both)
