"""``zlm bench serve`` on a real server: its figures beside the server's own counters."""

import json
from collections.abc import Callable

import pytest
from running_server import Server

from zlm.cli.bench import main

COUNTERS = {
    "tokens": "vllm:generation_tokens",
    "prompt": "vllm:prompt_tokens",
    "ttft": "vllm:time_to_first_token_seconds_sum",
    "e2e": "vllm:e2e_request_latency_seconds_sum",
    "requests": "vllm:e2e_request_latency_seconds_count",
}


def test_figures_are_those_of_the_servers_metrics(
    server: Server, capsys: pytest.CaptureFixture[str], eventually: Callable
) -> None:
    """Tokens exactly; TTFT and E2E of the client are the server's and the way there and back."""
    url, text = f"http://127.0.0.1:{server.port}", ["--prompts", "text"]
    shared = ["--concurrency", "2", "--output-tokens", "12", "--input-tokens", "60", "--json"]
    assert main(["serve", url, *shared, *text, "--requests", "1"]) == 0  # what it asks besides

    def counters() -> dict[str, float]:
        return {key: server.metric(name) for key, name in COUNTERS.items()}

    before = counters()
    assert (
        main(["serve", url, *shared, "--warm-up", "0", "--requests", "6", "--vocab", "40000"]) == 0
    )
    level = json.loads(capsys.readouterr().out.splitlines()[-1])["levels"][0]
    assert (level["ok"], level["output_tokens"], level["input_tokens"]) == (6, 72, 360)
    assert eventually(lambda: counters()["requests"] == before["requests"] + 6, 5)
    counted = {key: value - before[key] for key, value in counters().items()}
    assert (counted["tokens"], counted["prompt"]) == (72, 360)
    for name in ("ttft", "e2e"):
        theirs = 1e3 * counted[name] / 6
        assert theirs - 5 < level[f"{name}_mean_ms"] < 1.1 * theirs + 20, name


def test_a_chat_of_several_turns(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Random words come to the tokens that are wanted, the chat template's own included."""
    words = ["--endpoint", "chat", "--turns", "2", "--concurrency", "2", "--requests", "2"]
    words += ["--input-tokens", "80", "--output-tokens", "5", "--warm-up", "0"]
    assert main(["serve", f"http://127.0.0.1:{server.port}", *words]) == 0
    level = json.loads(capsys.readouterr().out.splitlines()[-1])["levels"][0]
    assert (level["ok"], level["output_tokens"], level["tokens_from"]) == (4, 20, "usage")
    first, second = 2 * 80, 2 * (80 + 5 + 80)
    assert level["input_tokens"] == pytest.approx(first + second, rel=0.15)
