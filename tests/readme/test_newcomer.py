"""A newcomer's first quarter of an hour, by the README's own lines.

From a clone to a server, a chat answer, a batch file, a benchmark with its report, and the page.

The lines are run as they stand, but for the port, and for an environment that has the packages of
this one, torch above all: fetching them again would show nothing.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from running_server import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
INSTALL_SECONDS, STEP_SECONDS = 240, 240


def block_with(words: str) -> str:
    """Return the README's first block of commands that has *words*."""
    return next(block for block in BLOCKS if words in block)


def clone(target: Path) -> None:
    """Copy what a clone of this tree would have."""
    if (ROOT / ".git").exists():
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
        names = subprocess.check_output([*listed, "--exclude-standard"], text=True).split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target / name)
    else:
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))


class Quickstart:
    """The quickstart, running in a clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        venv = folder / ".venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        home = next(venv.glob("lib/python*/site-packages"))
        packages = sysconfig.get_path("purelib")
        (home / "base.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
        line = block_with("bin/zlm-quickstart").splitlines()[0].partition("#")[0].strip()
        self.process = subprocess.Popen(
            [*line.split(), "--port", str(self.port), "--device", "cpu"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.shown = ""
        self.is_ready = threading.Event()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.shown += line
            if "Ctrl-C stops it" in line:
                self.is_ready.set()
        self.is_ready.set()  # it has ended

    def run(self, commands: str, told: str = "") -> str:
        """Run lines of the README in the clone; return what they print. *told*: standard input."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands.replace("8000", str(self.port))],
            cwd=self.folder,
            input=told,
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stop(self) -> int:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        status = self.process.wait(60)
        self._reader.join()
        return status


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    folder = tmp_path_factory.mktemp("newcomer") / "zlm"
    clone(folder)
    running = Quickstart(folder)
    assert running.is_ready.wait(INSTALL_SECONDS), running.shown
    assert running.process.poll() is None, running.shown
    yield running
    assert running.stop() == 0, running.shown[-3000:]


def test_it_says_what_it_does(quickstart: Quickstart) -> None:
    assert "zlm-quickstart: installing" in quickstart.shown
    python = quickstart.folder / ".venv" / "bin" / "python"
    found = quickstart.run(f"cd / && {python} -c 'import zlm; print(zlm.__file__)'")
    assert Path(found).is_relative_to(quickstart.folder / ".venv"), "the clone's own is run"
    assert f"zlm is ready at http://127.0.0.1:{quickstart.port}. Try:" in quickstart.shown


def test_a_chat_answer(quickstart: Quickstart) -> None:
    answer = json.loads(quickstart.run(block_with("curl http://127.0.0.1:8000/v1/chat")))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_batch_file_and_a_report(quickstart: Quickstart) -> None:
    commands = block_with("zlm run --url")
    assert "zlm chat --url" in commands and "zlm bench serve" in commands
    shown = quickstart.run(commands, told="What is the capital of France?\n")
    lines = (quickstart.folder / "answers.jsonl").read_text().splitlines()
    answers = {answer["id"]: answer for answer in map(json.loads, lines)}
    assert set(answers) == {"a", "b"} and "Paris" in answers["a"]["text"]
    measured = json.loads(shown.splitlines()[-1])
    assert measured["bench"] == "serve"
    report = (quickstart.folder / "report.html").read_text()
    assert "<svg" in report and "</html>" in report


def test_the_page(quickstart: Quickstart) -> None:
    page = quickstart.run("curl -sf http://127.0.0.1:8000/")
    assert "<html" in page and "<script" in page
