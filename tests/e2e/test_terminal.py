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

SECONDS = 60.0
QUESTION = "What is the capital of France?"


def command(server: Server, *words: str) -> list[str]:
    url = f"http://127.0.0.1:{server.port}/v1"
    return [sys.executable, "-m", "zlm.cli.main", *words, "--url", url, "--temperature", "0"]


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, words: list[str]) -> None:
        self._fd, other = pty.openpty()
        self.process = subprocess.Popen(
            words, stdin=other, stdout=other, stderr=other, start_new_session=True
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
    with Terminal(command(server, "chat", "--max-tokens", "24", "--system", "Be brief.")) as shell:
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
        shell.type("/nonsense\n")
        shell.expect("there is no /nonsense.*> ")
        shell.type("\x04")
        assert shell.process.wait(SECONDS) == 0


def test_an_answer_is_stopped(server: Server) -> None:
    """Ctrl-C ends the answer, the server's work on it too, and the conversation goes on."""
    with Terminal(command(server, "chat")) as shell:
        shell.expect("> ")
        shell.type("Write a very long story about a fox, a dog and a hen.\n")
        shell.expect(r"story.*\n.{20}")
        os.killpg(shell.process.pid, signal.SIGINT)
        shell.expect(r"\(stopped\).*> ")
        shell.type("/exit\n")
        assert shell.process.wait(SECONDS) == 0


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-p", "7"], "top_p must be between"),
        (["--model", "other"], "the model 'other' is not served here"),
    ],
)
def test_what_the_server_refuses(server: Server, words: list[str], message: str) -> None:
    asked = [*command(server, "chat"), *words]
    done = subprocess.run(asked, input="x", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr, done.stderr
