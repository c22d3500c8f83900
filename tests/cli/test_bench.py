"""``zlm bench`` on a tiny shape of random weights: offline, latency, startup, profile, serve."""

import json
import os
from pathlib import Path

import pytest
from config_files import LLAMA, write

from zlm.cli.bench import main
from zlm.cli.bench_profile import DecodeClock
from zlm.loadtest import startup

CONFIG = LLAMA | {"max_position_embeddings": 256, "torch_dtype": "float32"}
SMALL = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    write(tmp_path / "shape", "config.json", CONFIG)
    return tmp_path / "shape"


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["profile", "m", "--batch", "0"], 2, "at least 1"),
        (["profile", "m", "--frobnicate"], 2, "unknown flag --frobnicate"),
        (["profile", "/nowhere/m"], 1, "/nowhere/m"),
        (["serv"], 2, "did you mean serve?"),
        ([], 2, "usage: zlm bench WHAT"),
        (["offline", "m", "--cases", "b1,fast"], 2, "no case 'fast'"),
        (["offline", "m", "--set", "x"], 2, "--set x: must be NAME=VALUE"),
        (["latency", "m", "--batch-size", "0"], 2, "no case '0:128:128'"),
        (["serve"], 2, "give a TARGET"),
        (["serve", "http://h:1", "--port", "1"], 2, "--port: a server that runs takes no flags"),
        (["serve", "http://h:1", "--concurrency", "0"], 2, "--concurrency must be at least 1"),
        (["serve", "http://h:1", "--request-rate", "inf"], 2, "--request-rate inf needs"),
        (["serve", "http://h:1", "--goodput", "fast"], 2, "--goodput fast"),
        (["serve", "http://h:1", "--prompts", "ids", "--endpoint", "chat"], 2, "need text"),
        (["serve", "http://h:1", "--body", "[1]"], 2, "--body must be a JSON object"),
        (["serve", "/nowhere/m"], 1, "/nowhere/m"),
        (["serve", "http://127.0.0.1:1"], 1, "cannot be reached"),
        (["compare", "http://127.0.0.1:1", "http://127.0.0.1:1"], 1, "cannot be reached"),
        (["compare", "http://127.0.0.1:1", "nosuchcmd --port {port}"], 2, "no such command"),
        (["compare", "m.gguf 'unclosed", "m.gguf"], 2, "No closing quotation"),
        (["compare", "http://h:1", "vllm serve m"], 2, "'vllm serve m': a command needs {port}"),
        (["compare", "http://h:1", "sh -x y"], 2, "'sh -x y': a command needs {port}"),
        (["serve", ""], 2, "a TARGET is empty"),
        (["serve", "http://h:1", "--report", "/nope/r.html"], 2, "--report /nope/r.html: must be"),
        (["serve", "http://h:1", "--records", "/"], 2, "--records /: must be a file"),
        (["serve", "false {port}", "--server-log", "/nope/log"], 2, "/nope/log: No such file"),
        (["latency", "m.gguf", "--set", "foo=1"], 2, "unexpected keyword argument 'foo'"),
    ],
)
def test_what_is_wrong_is_told(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    assert said in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    command = "sh -c 'echo much >&2; echo zlm: no such model >&2; exit 3' {port}"
    assert main(["serve", command]) == 1
    said = "zlm bench serve: the server left with status 3: no such model\n"
    assert capsys.readouterr().err == said


def test_the_clock_counts_only_steps_of_the_whole_batch() -> None:
    clock = DecodeClock(os.getpid(), 4)
    for tokens in (3, 4, 0, 1, 8, 4):
        clock.advance(0, tokens)
        sum(range(20_000))
    assert clock._steps == 3
    assert clock.seconds_a_step > 0
    assert DecodeClock(os.getpid(), 4).seconds_a_step == 0


def test_a_whole_profile(shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_offline_and_latency(shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(shape), *SMALL, "--load-format", "dummy", "--set", "cpu_threads=1"]
    words = [*common, "--cases", "2:8:4,3:5:1", "--reps", "2", "--label", "engine=zlm"]
    assert main(["offline", *words]) == 0
    start, first, second = map(json.loads, lines(capsys))
    assert start["case"] == "start_s" and start["value"] > 0 and start["engine"] == "zlm"
    assert (first["n"], first["prompt"], first["output"], len(first["s"])) == (2, 8, 4, 2)
    assert first["out_tok_s"] == pytest.approx(8 / (sum(first["s"]) / 2), rel=0.01)
    assert second["total_tok_s"] == pytest.approx(6 * second["out_tok_s"], rel=0.01)
    assert main(["latency", *common, "--output-tokens", "3", "--reps", "4"]) == 0
    *_, told, last = lines(capsys)
    figures = json.loads(last)
    assert "1 x 128 tokens in, 3 out: mean" in told and len(figures["s"]) == 4
    assert min(figures["s"]) <= figures["s_p50"] <= figures["s_p99"] == max(figures["s"])


def test_startup(
    shape: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "SETTLE_SECONDS", 0.0)
    flags = [*SMALL, "--load-format", "dummy", "--skip-tokenizer-init", "--cpu-threads", "1"]
    assert main(["startup", str(shape), "--idle-seconds", "0.1", *flags]) == 0
    (run,) = json.loads(lines(capsys)[-1])["runs"]
    assert run["ready_s"] > run["timeline"][0][0] > 0 and run["first_answer_s"] > 0
    for role in ("worker", "engine", "tokenizer", "frontend"):
        assert any(f"zlm.{role}.process" in name for name in run["processes"])
    assert run["rss_mib"] >= run["pss_mib"] > 50 and run["stop_s"] < 30


def test_serving(shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server of its own; ids below the model's vocabulary; a report, and all requests' times."""
    flags = [*SMALL, "--load-format", "dummy", "--skip-tokenizer-init", "--cpu-threads", "1"]
    report, records = tmp_path / "r.html", tmp_path / "r.jsonl"
    words = ["--concurrency", "1,4", "--input-tokens", "uniform:3:20", "--output-tokens", "6"]
    words += ["--report", str(report), "--records", str(records), "--goodput", "e2e:60000"]
    assert main(["serve", str(shape), *words, "--", *flags]) == 0
    result = json.loads(lines(capsys)[-1])
    assert result["ready_s"] > 0 and result["stop_s"] < 30 and result["model"] == str(shape)
    one, four = result["levels"]
    assert (one["n"], one["ok"], four["n"], four["ok"]) == (4, 4, 16, 16), one["err"]
    assert four["output_tokens"] == 96 and four["tokens_from"] == "usage"
    assert 3 * 16 <= four["input_tokens"] <= 20 * 16 and four["good"] == 16
    assert 0 < four["ttft_p50_ms"] <= four["e2e_p50_ms"] and four["itl_mean_ms"] > 0
    assert "4 at once" in report.read_text() and len(records.read_text().splitlines()) == 20
