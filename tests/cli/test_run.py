"""``zlm run``: every line has exactly one answer, whatever ends the runs that it takes."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running_server import eventually_true
from tiny import tiny_checkpoint

from zlm.cli import run, run_input
from zlm.cli.run_input import Entry, digests, entries
from zlm.cli.run_journal import Journal
from zlm.errors import ConfigError

FLAGS = ["--max-model-len", "256", "--dtype", "float32", "--cpu-threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "m", "llama")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(model: Path, given: Path, output: Path, *more: str) -> list[str]:
    words = [str(model), str(given), "--output", str(output), *FLAGS, *more]
    return [sys.executable, "-m", "zlm.cli.main", "run", *words]


def write(path: Path, *values: Any) -> Path:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("\n".join(texts) + "\n")
    return path


@pytest.mark.parametrize(
    ("num_prompts", "kills"),
    [(24, (5,)), pytest.param(500, (50, 130, 220, 310, 400), marks=pytest.mark.slow)],
)
def test_runs_that_are_killed_go_on(
    tiny_path: Path, tmp_path: Path, num_prompts: int, kills: tuple[int, ...]
) -> None:
    """Killed with SIGKILL in the middle, again and again: each prompt has one answer in the end."""
    texts = {f"p{i}": f"{i} and {i} is" for i in range(num_prompts)}
    prompts = [{"id": i, "prompt": text, "ignore_eos": True} for i, text in texts.items()]
    given, output = write(tmp_path / "in", *prompts), tmp_path / "out"
    words = command(tiny_path, given, output, "--max-tokens", "8", "--temperature", "0")
    few = [*words, "--concurrency", "1"]  # so that the run can be met in its middle

    def num_answers() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    for least in kills:
        killed = subprocess.Popen(few, stderr=subprocess.PIPE)
        assert eventually_true(lambda least=least: num_answers() >= least, 60)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL and num_answers() < num_prompts
    before = output.read_bytes()
    num_before = before.count(b"\n")
    output.write_bytes(before + b'{"id":"p23","text":" 4')  # a line that was not finished
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = f"{num_before} of {num_prompts} are done: flags of this run do not change them; --anew"
    assert said in done.stderr
    assert output.read_bytes().startswith(before)
    answers = lines(output)
    assert Counter(answer["id"] for answer in answers) == Counter(p["id"] for p in prompts)
    assert all(a["error"] is None and a["usage"]["completion_tokens"] == 8 for a in answers)
    again = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert (again.returncode, lines(output)) == (0, answers), "a run that is done does nothing"


def test_forms_and_errors(smollm2_path: Path, tmp_path: Path) -> None:
    """OpenAI's batch lines, plain ones, and lines that are refused or are none."""
    chat = [{"role": "user", "content": "Say hi"}]
    body = {"model": "gpt-4o", "messages": chat, "max_tokens": 3, "stream": True}
    given = write(
        tmp_path / "in",
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "bad", "url": "/v1/chat/completions", "body": {"messages": []}},
        {"custom_id": "lost", "url": "/v1/images", "body": {}},
        {"messages": chat, "n": 2},
        "no JSON",
        {"id": 77, "prompt": "x", "temperature": 9},
        {"id": "both", "prompt": "x", "messages": chat},
    )
    output = tmp_path / "out"
    done = subprocess.run(
        command(smollm2_path, given, output, "--max-tokens", "4"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert "7 answers, 5 of them errors" in done.stderr
    answers = {answer.get("custom_id", answer["id"]): answer for answer in lines(output)}
    assert answers["b"]["response"]["status_code"] == 200
    assert answers["b"]["response"]["body"]["usage"]["completion_tokens"] <= 3
    assert answers["bad"]["response"]["status_code"] == 400 and answers["bad"]["error"] is None
    assert answers["lost"]["response"] is None
    assert "line 3: url must be one of" in answers["lost"]["error"]["message"]
    assert len(answers["4"]["choices"]) == 2
    assert answers["5"]["error"].startswith("line 5 is no JSON")
    assert "temperature must be between" in answers["77"]["error"]
    assert answers["both"]["error"] == "line 7 has both prompt and messages: give one"


def test_a_model_that_cannot_be_served(tmp_path: Path) -> None:
    given = write(tmp_path / "in", {"prompt": "x"})
    output = tmp_path / "out"
    done = subprocess.run(
        command(tmp_path / "absent", given, output), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "zlm run: there is no file or folder" in done.stderr
    assert output.read_text() == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--body", "[]"], "--body must be a JSON object"),
        (["--max-model-len", "0"], "--max-model-len must be between"),
    ],
)
def test_wrong_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    given = write(tmp_path / "in", {"prompt": "x"})
    assert run.main(["m", str(given), "-o", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


def test_ids_must_be_unique(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the id 2 is there twice"):
        digests(write(tmp_path / "in", {"id": "2", "prompt": "x"}, {"prompt": "y"}))
    with pytest.raises(ConfigError, match="cannot read"):
        digests(tmp_path / "absent")


def test_defaults_are_for_fields_that_a_line_lacks(tmp_path: Path) -> None:
    given = write(tmp_path / "in", {"prompt": "a", "max_tokens": 1}, {"prompt": "b"})
    found = [json.loads(entry.body) for entry in entries(given, {"max_tokens": 9, "seed": 4})]
    assert found == [
        {"max_tokens": 1, "seed": 4, "prompt": "a"},
        {"max_tokens": 9, "seed": 4, "prompt": "b"},
    ]
    assert run_input.PATHS[1] == next(entries(given, {})).path


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.write_bytes(b'\xef\xbb\xbf{"id": "a", "prompt": "x"}\n')
    marked = list(entries(given, {}))
    assert marked == list(entries(write(given, {"id": "a", "prompt": "x"}), {}))
    assert not marked[0].problem


def test_prompts_that_changed_under_their_ids_are_noticed(tmp_path: Path) -> None:
    batch = {"custom_id": "b", "body": {"messages": [], "max_tokens": 3}}
    given = write(tmp_path / "in", {"id": "a", "prompt": "x"}, batch, "no JSON")
    output = tmp_path / "out"
    journal = Journal(output)
    for entry in entries(given, {"temperature": 0}):
        journal.write(entry, 400, {"error": {"message": "no"}}, "")
    journal.close()
    again = Journal(output)
    same = write(tmp_path / "same", '{"prompt":"x",  "id": "a"}', batch, "no JSON")
    again.check(digests(same))  # other white space, an order, defaults: nothing has changed
    batch["body"]["max_tokens"] = 4  # type: ignore[index]
    changed = write(tmp_path / "changed", {"id": "a", "prompt": "y"}, batch, "no JSON")
    with pytest.raises(ConfigError, match="have changed in the input since: a and 1 more"):
        again.check(digests(changed))
    again.close()
    write(output, {"id": "a", "text": "an answer of an older version"})
    old = Journal(output)
    old.check(digests(changed))
    old.close()


def test_an_output_of_other_requests_is_not_added_to(tmp_path: Path) -> None:
    output = tmp_path / "out"
    journal = Journal(output)
    journal.write(Entry("a", False), 0, "why", "")
    with pytest.raises(ConfigError, match="is being written by another run"):
        Journal(output)
    journal.close()
    again = Journal(output)
    assert (list(again.done), again.num_failed) == (["a"], 1)
    with pytest.raises(ConfigError, match="holds an answer to a, which the input does not have"):
        again.check({"b": ""})
    again.close()
    whole = output.read_bytes()
    output.write_bytes(whole + whole[:20])  # killed while it wrote
    Journal(output).close()
    assert output.read_bytes() == whole
    output.write_bytes(whole[:-1])
    Journal(output).close()
    assert output.read_bytes() == whole
    write(output, "text")
    with pytest.raises(ConfigError, match="holds no answers: see line 1"):
        Journal(output)
    anew = Journal(output, anew=True)
    assert not anew.done and output.read_bytes() == b""
    anew.close()
