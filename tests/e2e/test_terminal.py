"""``zlm chat`` and ``zlm complete`` with a running server: in a terminal, and in a pipe."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import pytest
from running_server import Server
from tiny import tiny_checkpoint

SECONDS = 60.0
QUESTION = "What is the capital of France?"


def command(server: Server, *words: str) -> list[str]:
    url = f"http://127.0.0.1:{server.port}/v1"
    return [sys.executable, "-m", "zlm.cli.main", *words, "--url", url, "--temperature", "0"]


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, words: list[str], *, state: Path) -> None:
        """*state*: the folder that stands for the user's ~/.local/state."""
        self._fd, other = pty.openpty()
        self.process = subprocess.Popen(
            words,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env=os.environ | {"XDG_STATE_HOME": str(state)},
        )
        os.close(other)
        self.shown = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> str:
        """Read until *pattern* is shown; return all up to its end, which is then forgotten."""
        deadline = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.shown, re.DOTALL)) is None:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._fd], [], [], left)[0], self.shown
            self.shown += os.read(self._fd, 4096).decode(errors="replace")
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text


def test_a_conversation(server: Server, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with Terminal(
        command(server, "chat", "--max-tokens", "24", "--system", "Be brief."), state=tmp_path
    ) as shell:
        shell.expect("smol .*/help shows.*> ")
        shell.type(f"{QUESTION}\n")
        first = shell.expect(r"Paris.*\n> ")
        assert "�" not in first
        shell.type("And of\\\n")
        shell.type("Italy?\n")
        shell.expect(r"Italy\?.*\n> ")
        shell.type(f"/save {saved}\n")
        shell.expect("written to.*> ")
        messages = json.loads(saved.read_text())
        assert [message["role"] for message in messages] == [
            "system", "user", "assistant", "user", "assistant",
        ]  # fmt: skip
        assert messages[1]["content"] == QUESTION and "Paris" in messages[2]["content"]
        assert messages[3]["content"] == "And of\nItaly?"
        shell.type("/undo\n")
        shell.expect("1 answers are left.*> ")
        shell.type("/retry\n")
        shell.expect("Paris.*the answer before is forgotten.*> ")
        shell.type(f"/load {saved}\n")
        shell.expect("2 answers are there.*> ")
        shell.type("/history\n")
        shell.expect(r"user: And of.*Italy\?.*assistant: .*> ")
        shell.type(f"/load {__file__}\n")
        shell.expect("holds no conversation.*> ")
        shell.type("/nonsense\n")
        shell.expect("there is no /nonsense.*> ")
        shell.type("\x04")
        assert shell.process.wait(SECONDS) == 0
    history = tmp_path / "zlm" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert QUESTION in history.read_text().splitlines()
    with Terminal(command(server, "chat", "--max-tokens", "2"), state=tmp_path) as shell:
        shell.expect("> ")
        shell.type("\x10")  # Ctrl-P: the last line of the last time
        shell.expect("/nonsense")
        shell.type("\x03")


def test_an_answer_is_stopped(server: Server, tmp_path: Path) -> None:
    """Ctrl-C ends the answer, the server's work on it too, and the conversation goes on."""
    with Terminal(command(server, "chat"), state=tmp_path) as shell:
        shell.expect("> ")
        shell.type("Write a very long story about a fox, a dog and a hen.\n")
        shell.expect(r"story.*\n.{20}")
        os.killpg(shell.process.pid, signal.SIGINT)
        shell.expect(r"\(stopped\).*> ")
        shell.type("/exit\n")
        assert shell.process.wait(SECONDS) == 0


def test_a_model_in_place(tmp_path: Path) -> None:
    """It is loaded for the conversation; a message may have several lines; a pipe works, too."""
    model = tiny_checkpoint(tmp_path / "m", "llama")
    flags = ["--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--max-tokens", "4"]
    words = [sys.executable, "-m", "zlm.cli.main", "chat", str(model), *flags, "--temperature", "0"]
    with Terminal(words, state=tmp_path) as shell:
        shell.expect("loading, .*/help shows.*> ")
        shell.type('"""\nfirst\nsecond\n"""\n')
        shell.expect(r"cut off by the limit.*\n> ")
        shell.type("/history\n")
        shell.expect(r"user: first\s+second.*assistant: .*> ")
        shell.type("/exit\n")
        assert shell.process.wait(SECONDS) == 0
    piped = subprocess.run(words, input="first", capture_output=True, text=True, timeout=60)
    assert piped.returncode == 0 and len(piped.stdout) > 1


def test_a_pipe_gets_the_answer_alone(server: Server) -> None:
    words = command(server, "chat", "--max-tokens", "24")
    done = subprocess.run(words, input=f"{QUESTION}\n", capture_output=True, text=True, timeout=60)
    raw = server.chat(QUESTION, max_tokens=24)
    assert (done.returncode, done.stdout, done.stderr) == (0, raw.text + "\n", "")


def test_complete(server: Server) -> None:
    words = command(server, "complete", "--max-tokens", "8")
    given = [*words, "--prompt", "The capital of France is"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(" Paris")
    text = "The capital of France is\n"
    piped = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)
    assert piped.stdout == done.stdout


def test_a_file_of_requests_for_a_running_server(server: Server, tmp_path: Path) -> None:
    given, output = tmp_path / "in", tmp_path / "out"
    prompts = [{"id": str(i), "prompt": f"{i}, {i + 1},", "max_tokens": 4} for i in range(6)]
    given.write_text("\n".join(map(json.dumps, prompts)))
    words = command(server, "run", str(given), "--output", str(output))
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(answer["id"] for answer in answers) == list("012345")
    assert server.complete("3, 4,", max_tokens=4).text == next(
        answer["text"] for answer in answers if answer["id"] == "3"
    )
    refused = subprocess.run([*words, "--dtype", "float32"], capture_output=True, text=True)
    assert refused.returncode == 2 and "takes no flags" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", str(2**63)], "seed must be between"),
        (["--model", "other"], "the model 'other' is not served here"),
    ],
)
def test_what_the_server_refuses(server: Server, words: list[str], message: str) -> None:
    asked = [*command(server, "chat"), *words]
    done = subprocess.run(asked, input="x", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr, done.stderr
