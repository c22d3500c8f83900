"""``zlm bench profile``: its arguments, its clock, and a whole run on a tiny shape."""

import json
import os
from pathlib import Path

import pytest

from zlm.cli.bench import DecodeClock, main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["profile", "m", "--batch", "0"], 2, "at least 1"),
        (["profile", "m", "--frobnicate"], 1, "unknown flag --frobnicate"),
        (["profile", "/nowhere/m"], 1, "/nowhere/m"),
    ],
    ids=["batch", "flag", "model"],
)
def test_what_is_wrong_is_told(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    assert said in capsys.readouterr().err


def test_the_clock_counts_only_steps_of_the_whole_batch() -> None:
    clock = DecodeClock(os.getpid(), 4)
    for tokens in (3, 4, 0, 1, 8, 4):
        clock.advance(0, tokens)
        sum(range(20_000))
    assert clock._steps == 3
    assert clock.seconds_a_step > 0
    assert DecodeClock(os.getpid(), 4).seconds_a_step == 0


def test_a_whole_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(CONFIG))
    words = [
        "--load-format",
        "dummy",
        "--batch",
        "3",
        "--input-tokens",
        "20",
        "--steps",
        "5",
        "--device",
        "cpu",
    ]
    words += ["--max-num-batched-tokens", "32", "--output", str(tmp_path), "--cpu-threads", "1"]
    assert main(["profile", str(shape), *words]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["decode"]["steps"] == 5 and result["prefill"]["steps"] in (2, 3)
    assert result["host"]["wall_us"] > 0 and result["host"]["engine_cpu_us"] > 0
    decode = {kernel["name"]: kernel for kernel in result["decode"]["kernels"]}
    assert sum(kernel["share"] for kernel in decode.values()) == pytest.approx(1, abs=0.01)
    assert "launches/step" in out
    for name in ("decode.json", "prefill.json"):
        assert json.loads((tmp_path / name).read_text())["traceEvents"]
