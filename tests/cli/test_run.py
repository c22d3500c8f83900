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

from zlm.cli import run, run_input
from zlm.cli.run_input import Entry, entries, ids_of
from zlm.cli.run_journal import Journal
from zlm.errors import ConfigError

FLAGS = ["--max-model-len", "256", "--dtype", "float32", "--cpu-threads", "1"]
NUM_PROMPTS = 24


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(model: Path, given: Path, output: Path, *more: str) -> list[str]:
    words = [str(model), str(given), "--output", str(output), *FLAGS, *more]
    return [sys.executable, "-m", "zlm.cli.main", "run", *words]


def write(path: Path, *values: Any) -> Path:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_runs_that_are_killed_go_on(smollm2_path: Path, tmp_path: Path) -> None:
    texts = {f"p{i}": f"{i} and {i} is" for i in range(NUM_PROMPTS)}
    prompts = [{"id": i, "prompt": text, "ignore_eos": True} for i, text in texts.items()]
    given, output = write(tmp_path / "in", *prompts), tmp_path / "out"
    words = command(smollm2_path, given, output, "--max-tokens", "8", "--temperature", "0")
    few = [*words, "--concurrency", "2"]  # so that the run can be met in its middle

    def num_answers() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    for least in (3, 9):
        killed = subprocess.Popen(few, stderr=subprocess.PIPE)
        assert eventually_true(lambda least=least: num_answers() >= least, 60)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    before = output.read_bytes()
    num_before = before.count(b"\n")
    assert num_before < NUM_PROMPTS
    output.write_bytes(before + b'{"id":"p23","text":" 4')  # a line that was not finished
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{num_before} of {NUM_PROMPTS} are done" in done.stderr
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
    )
    output = tmp_path / "out"
    done = subprocess.run(
        command(smollm2_path, given, output, "--max-tokens", "4"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert "6 answers, 4 of them errors" in done.stderr
    answers = {answer.get("custom_id", answer["id"]): answer for answer in lines(output)}
    assert answers["b"]["response"]["status_code"] == 200
    assert answers["b"]["response"]["body"]["usage"]["completion_tokens"] <= 3
    assert answers["bad"]["response"]["status_code"] == 400 and answers["bad"]["error"] is None
    assert answers["lost"]["response"] is None
    assert "line 3: url must be one of" in answers["lost"]["error"]["message"]
    assert len(answers["4"]["choices"]) == 2
    assert answers["5"]["error"].startswith("line 5 is no JSON")
    assert "temperature must be between" in answers["77"]["error"]


def test_a_model_that_cannot_be_served(tmp_path: Path) -> None:
    given = write(tmp_path / "in", {"prompt": "x"})
    output = tmp_path / "out"
    done = subprocess.run(
        command(tmp_path / "absent", given, output), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "the server has ended" in done.stderr and "no file or folder" in done.stderr
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
        ids_of(write(tmp_path / "in", {"id": "2", "prompt": "x"}, {"prompt": "y"}))
    with pytest.raises(ConfigError, match="cannot read"):
        ids_of(tmp_path / "absent")


def test_defaults_are_for_fields_that_a_line_lacks(tmp_path: Path) -> None:
    given = write(tmp_path / "in", {"prompt": "a", "max_tokens": 1}, {"prompt": "b"})
    found = [json.loads(entry.body) for entry in entries(given, {"max_tokens": 9, "seed": 4})]
    assert found == [
        {"max_tokens": 1, "seed": 4, "prompt": "a"},
        {"max_tokens": 9, "seed": 4, "prompt": "b"},
    ]
    assert run_input.PATHS[1] == next(entries(given, {})).path


def test_an_output_of_other_requests_is_not_added_to(tmp_path: Path) -> None:
    output = tmp_path / "out"
    journal = Journal(output)
    journal.write(Entry("a", False), 0, "why", "")
    with pytest.raises(ConfigError, match="is being written by another run"):
        Journal(output)
    journal.close()
    again = Journal(output)
    assert (again.done, again.num_failed) == ({"a"}, 1)
    with pytest.raises(ConfigError, match="holds an answer to a, which the input does not have"):
        again.check({"b"})
    again.close()
    write(output, "text")
    with pytest.raises(ConfigError, match="holds no answers: see line 1"):
        Journal(output)
    anew = Journal(output, anew=True)
    assert not anew.done and output.read_bytes() == b""
    anew.close()
