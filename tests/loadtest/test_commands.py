"""``zlm bench serve`` and ``compare`` as they are typed, against scripted servers."""

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from zlm.cli.bench import main

Scripted = Callable[..., ScriptedServer]
SERVE = """
import sys
sys.path.append(sys.argv[1])
from scripted_server import Script, ScriptedServer
with ScriptedServer(Script(first=0.06), int(sys.argv[2])) as server:
    server._thread.join()
"""


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], str]]:
    def run(*words: str, status: int = 0) -> tuple[dict[str, Any], str]:
        assert main(list(words)) == status
        out = capsys.readouterr().out
        return json.loads(out.splitlines()[-1]), out

    return run


def test_a_closed_loop(scripted: Scripted, said: Callable) -> None:
    server = scripted(first=0.02)
    words = ["--concurrency", "1,3", "--output-tokens", "4", "--goodput", "ttft:5", "e2e:9000"]
    result, out = said("serve", server.url, *words)
    one, three = result["levels"]
    assert (one["conc"], one["n"], three["conc"], three["n"]) == (1, 4, 3, 12)
    assert one["good"] == 0 and "(0.0%) met ttft<=5ms e2e<=9000ms" in out
    bodies = [served.body for served in server.served]
    assert len(bodies) == (1 + 4) + (3 + 12), "a warm-up request for each client"
    assert {len(body["prompt"]) for body in bodies} == {128}
    assert len({tuple(body["prompt"]) for body in bodies}) == len(bodies)
    assert all(body["model"] == "scripted" and body["ignore_eos"] for body in bodies)
    again, _ = said("serve", server.url, *words)
    assert again["seed"] != result["seed"], "no prompt twice, or a prefix cache would answer"
    prompts = {tuple(served.body["prompt"]) for served in server.served}
    assert len(prompts) == 2 * len(bodies)


def test_a_seed_gives_the_same_prompts(scripted: Scripted, said: Callable) -> None:
    server = scripted()
    words = ["--concurrency", "1", "--requests", "3", "--warm-up", "0", "--seed", "7"]
    for _ in range(2):
        said("serve", server.url, *words, "--output-tokens", "uniform:1:9")
    asked = [(s.body["prompt"], s.body["max_tokens"]) for s in server.served]
    assert len(asked) == 6 and asked[:3] == asked[3:]


def test_an_open_loop(scripted: Scripted, said: Callable) -> None:
    server = scripted()
    words = ["--request-rate", "100", "--duration", "0.3", "--burstiness", "inf", "--json"]
    result, out = said("serve", server.url, *words, "--output-tokens", "2", "--warm-up", "1")
    (level,) = result["levels"]
    assert (level["rate"], level["n"], level["measured_from"]) == (100, 30, "due")
    assert level["offered_req_s"] == pytest.approx(100, rel=0.01)
    assert json.loads(out.splitlines()[0]) == level


def test_a_chat_has_the_tokens_that_were_asked_for(scripted: Scripted, said: Callable) -> None:
    """The server counts a token a word and seven around: found out before, and allowed for."""
    server = scripted()
    words = ["--endpoint", "chat", "--concurrency", "2", "--turns", "2", "--requests", "3"]
    words += ["--input-tokens", "50", "--output-tokens", "3", "--body", '{"top_k": 4}']
    result, _ = said("serve", server.url, *words, "--api-key", "secret")
    (level,) = result["levels"]
    assert (level["n"], level["ok"]) == (6, 6)
    first = [s for s in server.served[-6:] if len(s.body["messages"]) == 1]
    assert {len(s.body["messages"][0]["content"].split()) for s in first} == {43}
    assert {s.body["top_k"] for s in server.served} == {4}
    assert {s.headers["authorization"] for s in server.served} == {"Bearer secret"}


def test_a_file_of_conversations(scripted: Scripted, said: Callable, tmp_path: Path) -> None:
    """Four characters a word: an answer of 20 words is one of 20 tokens here."""
    server, path = scripted(), tmp_path / "share.json"
    question = {"from": "human", "value": "abc " * 250}
    rows = [{"conversations": [question, {"from": "gpt", "value": "xyz " * 20}]}]
    path.write_text(json.dumps(rows))
    words = ["--dataset", str(path), "--concurrency", "1", "--requests", "2", "--warm-up", "0"]
    result, _ = said("serve", server.url, *words, "--endpoint", "chat")
    (level,) = result["levels"]
    assert level["output"] == "file" and level["ok"] == 2
    assert {s.body["max_tokens"] for s in server.served[-2:]} == {20}


def test_messages_are_for_a_chat(
    scripted: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    assert main(["serve", scripted().url, "--dataset", str(path)]) == 2
    assert "messages are not for --endpoint completions" in capsys.readouterr().err


def test_a_server_that_answers_nothing(scripted: Scripted, said: Callable) -> None:
    server = scripted(failures=dict.fromkeys(range(9), "503"))
    result, out = said(
        "serve", server.url, "--concurrency", "1", "--requests", "3", "--warm-up", "0", status=1
    )
    assert result["levels"][0]["errors_by_kind"] == {"http_503": 3}
    assert "3 x http_503" in out and "as scripted" in out


def test_all_at_once(scripted: Scripted, said: Callable) -> None:
    """As many as there are: no rate, no cap, and no more clients than requests."""
    words = ["--requests", "2", "--output-tokens", "2"]
    server = scripted()
    result, out = said("serve", server.url, "--request-rate", "inf", *words)
    assert result["levels"][0]["ok"] == 2 and "all at once" in out
    assert len(server.served) == 2 + 2, "a warm-up request for each"
    result, out = said("serve", server.url, "--concurrency", "5000", *words)
    (level,) = result["levels"]
    assert (level["conc"], level["asked_conc"], level["n"]) == (2, 5000, 2)
    assert "2 at once, not 5000" in out and "5000 at once" not in out


def test_a_server_that_never_replies(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["serve", url, "--timeout", "0.2"]) == 1
    said = capsys.readouterr().err
    assert "has not answered" in said and said.count("\n") == 1


def test_turns_that_a_file_has_not(
    scripted: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "x"}))
    assert main(["serve", scripted().url, "--dataset", str(path), "--turns", "3"]) == 2
    assert "--turns 3: the longest conversation of --dataset has 1" in capsys.readouterr().err


def test_what_was_measured_is_not_lost(scripted: Scripted, said: Callable) -> None:
    """B answers nothing but its models: A's figures are told all the same."""
    broken = scripted(failures=dict.fromkeys(range(9), "503"))
    words = ["--concurrency", "1", "--requests", "2", "--output-tokens", "1"]
    result, _ = said("compare", scripted().url, broken.url, *words, status=1)
    assert result["A"][0]["levels"][0]["ok"] == 2 and "ratios" not in result
    assert "warm-up requests failed" in result["broken_off"]


def test_two_servers_and_their_ratios(scripted: Scripted, said: Callable, tmp_path: Path) -> None:
    """B is started by its command and takes three times as long; both get the same prompts."""
    a = scripted(first=0.02)
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    support = Path(sys.modules[ScriptedServer.__module__].__file__ or "").parent
    b = f"{sys.executable} {script} {support} {{port}}"
    words = ["--concurrency", "1", "--requests", "3", "--output-tokens", "1", "--rounds", "2"]
    report = tmp_path / "r.html"
    result, out = said("compare", a.url, b, *words, "--report", str(report))
    (ratio,) = result["ratios"]
    assert 1.3 < ratio["ttft_p50_ms"] < 6 and 0.1 < ratio["req_s"] < 0.8
    assert "B / A" in out and "B / A" in report.read_text()
    assert [len(result[name]) for name in "AB"] == [2, 2]
    assert result["A"][0]["seed"] == result["B"][0]["seed"] != result["A"][1]["seed"]
    assert "ready_s" in result["B"][0] and "ready_s" not in result["A"][0]
