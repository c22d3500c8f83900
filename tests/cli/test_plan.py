"""``zlm plan``: what fits a card, from a description alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zlm.cli.main import main

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that holds a description and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    return status, *capsys.readouterr()


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_a_model_that_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(capsys, model, "--gpu-memory", "80GB", "--max-model-len", "8192")
    assert status == 0
    assert number(r"weights +([\d.]+) GiB", out) == 14.96  # 8.03e9 values of 2 bytes
    assert "it fits; the longest --max-model-len would be 131072" in out
    tokens = number(r"full +\d+ +(\d+)", out)
    assert f"{int(tokens // 8192)} of 8192" in out
    assert f"{int(tokens // 4096)} of 4096" in out


def test_sizes_side_by_side(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(capsys, model, "--gpu-memory", "8GB,24GiB", "--max-model-len", "4096")
    assert status == 0
    small, large = out.split("a GPU of 24.0 GiB")
    assert "it does not fit" in small and "weights 14.96" in small
    assert "it fits" in large


def test_nothing_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(capsys, model, "--gpu-memory", "8GB")
    assert status == 1
    assert "the model does not fit the GPU" in out


def test_which_quantization_would_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 6: each by itself, and the flag it takes."""
    card = (model, "--gpu-memory", "16GB", "--max-model-len", "4096")
    _, out, _ = plan(capsys, *card)
    assert "it would fit with --quantization fp8, or with --quantization w4a16" in out
    assert plan(capsys, *card, "--quantization", "fp8")[0] == 0


def test_the_advice_holds(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What an error tells to give is enough."""
    words = (model, "--gpu-memory", "24GB")
    status, out, _ = plan(capsys, *words)
    assert status == 1
    length = int(number(r"give --max-model-len (\d+) or less", out))
    assert plan(capsys, *words, "--max-model-len", str(length))[0] == 0


def test_old_cards_have_no_bfloat16(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (model, "--gpu-memory", "32GB", "--compute-capability", "7.5")
    _, out, _ = plan(capsys, *words, "--max-model-len", "2048")
    assert " in float16:" in out
    status, _, err = plan(capsys, *words, "--dtype", "bfloat16")
    assert status == 2 and "has no bfloat16" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory", "8"], "--gpu-memory 8: a card has at least 1 GiB"),
        (["--gpu-memory", "many"], "--gpu-memory many: must be a number of bytes"),
        (["--gpu-memory", "8GB", "--compute-capability", "x"], "must be two numbers such as 7.5"),
        (["--gpu-memory", "8GB", "--max-model-len", "200000"], "exceeds the 131072 tokens"),
    ],
)
def test_wrong_words(
    model: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    status, _, err = plan(capsys, model, *words)
    assert status == 2
    assert message in err


def test_several_gpus_are_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    card = (model, "--gpu-memory", "24GB", "--max-model-len", "4096")
    alone = number(r"weights +([\d.]+) GiB", plan(capsys, *card)[1])
    _, out, _ = plan(capsys, *card, "-tp", "4")
    assert "\n4 GPUs; memory is that of each\n" in out
    assert number(r"weights +([\d.]+) GiB", out) < 0.3 * alone
    _, out, _ = plan(capsys, *card, "-tp", "2", "-pp", "3")
    told = "6 GPUs; memory is that of each of stage 2, which has most to hold: layers 21 to 31"
    assert f"\n{told}\n" in out
    for flags, words in (
        (("-pp", "33"), "--pipeline-parallel-size 33: the model has 32 layers"),
        (("-tp", "3"), "--tensor-parallel-size 3 does not divide the model's 32 attention heads"),
    ):
        status, _, err = plan(capsys, *card, *flags)
        assert status == 2 and words in err


def test_a_model_of_vectors(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words: list[Any] = [model, "--gpu-memory", "8GB", "--task", "embedding"]
    status, _, err = plan(capsys, *words)
    assert status == 2 and "has no KV cache to plan" in err


def test_the_longest_context_is_taken_for_auto(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 6: and keys and values of 8 bits leave room for twice as many tokens."""
    card = (model, "--gpu-memory", "24GB", "--max-model-len", "auto")
    longest = []
    for kind in ("auto", "fp8"):
        status, out, _ = plan(capsys, *card, "--kv-cache-dtype", kind)
        assert status == 0
        longest.append(number(r"longest --max-model-len would be (\d+)", out))
        assert f"1 of {longest[-1]:.0f}" in out, "that long, it is one sequence at a time"
    assert "its cache in fp8_e4m3: --max-model-len auto" in out
    assert 1.9 < longest[1] / longest[0] < 2.1
