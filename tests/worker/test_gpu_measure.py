"""The compute type on cards old and new (CASES 100), and what is told of a GPU out of use."""

import logging
import subprocess

import pytest
import torch
from specs import small_spec

from zlm.errors import ConfigError
from zlm.worker import gpu_measure
from zlm.worker.gpu_measure import compute_dtype

HOPPER, TURING = (9, 0), (7, 5)


@pytest.mark.parametrize(
    ("wanted", "stored", "capability", "expected"),
    [
        ("auto", "bfloat16", HOPPER, torch.bfloat16),
        ("auto", "float16", HOPPER, torch.float16),
        ("auto", "float32", HOPPER, torch.bfloat16),
        ("auto", "bfloat16", TURING, torch.float16),
        ("auto", "float16", TURING, torch.float16),
        ("auto", "float32", TURING, torch.float16),
        ("float32", "bfloat16", HOPPER, torch.float32),
        ("half", "bfloat16", HOPPER, torch.float16),
        ("bfloat16", "float32", (8, 6), torch.bfloat16),
        ("float", "bfloat16", TURING, torch.float32),
    ],
)
def test_the_compute_type(
    wanted: str, stored: str, capability: tuple[int, int], expected: torch.dtype
) -> None:
    spec = small_spec(checkpoint_dtype=stored)
    assert compute_dtype(wanted, "auto", spec, capability) is expected


def test_a_quantized_file_is_computed_in_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = small_spec(checkpoint_dtype="bfloat16", weights_format="gguf")
    assert compute_dtype("auto", "auto", spec, HOPPER) is torch.bfloat16
    assert "the checkpoint is quantized" in caplog.text


@pytest.mark.parametrize(
    ("stored", "capability", "level", "words"),
    [
        (
            "bfloat16",
            TURING,
            logging.WARNING,
            "float16: the checkpoint's is bfloat16, but this",
        ),
        ("bfloat16", HOPPER, logging.INFO, "compute type bfloat16, the checkpoint's"),
        ("float32", HOPPER, logging.INFO, "bfloat16: the checkpoint's is float32; --dtype float32"),
    ],
)
def test_auto_says_why(
    caplog: pytest.LogCaptureFixture,
    stored: str,
    capability: tuple[int, int],
    level: int,
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    compute_dtype("auto", "auto", small_spec(checkpoint_dtype=stored), capability)
    (record,) = caplog.records
    assert record.levelno == level and words in record.message


def test_bfloat16_on_an_old_card_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--dtype bfloat16: this GPU .*7\.5.*give float16"):
        compute_dtype("bfloat16", "auto", small_spec(), TURING)


def test_the_cache_is_of_the_compute_type() -> None:
    spec = small_spec(checkpoint_dtype="bfloat16")
    assert compute_dtype("auto", "bfloat16", spec, HOPPER) is torch.bfloat16
    with pytest.raises(ConfigError, match="--kv-cache-dtype float16: on a GPU keys and values"):
        compute_dtype("auto", "float16", spec, HOPPER)


def test_a_gpu_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", broken)
    with pytest.raises(ConfigError) as caught:
        gpu_measure.open_device()
    assert caught.value.message == (
        "the GPU cannot be used: The NVIDIA driver on your system is too old. "
        "Give --device cpu to compute without it"
    )


def test_who_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "71, python3, 39000 MiB\n\n72, x, 5 MiB\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_measure._holders() == "process 71, python3, 39000 MiB; process 72, x, 5 MiB"


def test_without_nvidia_smi_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpu_measure._holders() == ""
