"""``zlm doctor``: each thing that can be wrong is told with what to do."""

import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from zlm.cli import doctor, doctor_checks as checks
from zlm.cli.doctor_checks import Finding, State


def test_the_whole_report_of_this_machine() -> None:
    """It runs, without a hub, and says of each part how it is."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "zlm.cli.main", "doctor", "--port", number]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=offline())
    assert done.returncode == 1, done.stderr
    for part in ("python", "packages", "gpu", "machine", "model cache", "kernel cache", "hub"):
        assert f" {part}" in done.stdout
    assert f"bad  port          127.0.0.1:{number}: Address already in use" in done.stdout
    assert done.stdout.endswith("to be put right\n")


def offline() -> dict[str, str]:
    import os

    return os.environ | {"HF_HUB_OFFLINE": "1"}


def one(findings: object) -> Finding:
    (finding,) = findings  # type: ignore[misc]
    return finding


def test_a_free_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    assert one(checks.port("127.0.0.1", number)).state is State.GOOD
    assert one(checks.port("no.such.host.invalid", number)).state is State.BAD


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('CUDA driver initialization failed')", "initialization failed"),
        ("import time; time.sleep(60)", "did not start CUDA within 0.5 s"),
        ('print(\'{"cuda": "13.0", "gpus": []}\')', "built for CUDA 13.0) sees no GPU"),
    ],
)
def test_a_gpu_that_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    monkeypatch.setattr(checks, "TORCH_PROGRAM", program)
    seconds = 0.5 if "sleep" in program else 30.0
    finding = one(checks._cards(checks.ask_torch(seconds)))
    assert finding.state is State.BAD
    assert words in finding.text and finding.advice


def test_a_cpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "missing_gpu", lambda: "there is none")
    note, kernels = checks.gpu()
    assert (note.state, kernels.state) == (State.NOTE, State.GOOD)
    monkeypatch.setenv("CC", "/no/such/compiler")
    _, kernels = checks.gpu()
    assert kernels.state is State.NOTE and "no C compiler" in kernels.text
    assert "install gcc" in kernels.advice


def test_cards_that_are_held_or_old() -> None:
    gib = 2**30
    facts = {
        "cuda": "13.0",
        "gpus": [
            ["NVIDIA H200", "9.0", 139 * gib, 140 * gib],
            ["NVIDIA H200", "9.0", 10 * gib, 140 * gib],
            ["RTX 2070", "7.5", 7 * gib, 8 * gib],
        ],
    }
    free, held, old = checks._cards(facts)
    assert (free.state, held.state, old.state) == (State.GOOD, State.NOTE, State.NOTE)
    assert "10.0 of 140.0 GiB free" in held.text and "nvidia-smi" in held.advice
    assert "float16" in old.advice


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    environment = {"HF_HOME": "/proc/zlm", "XDG_CACHE_HOME": str(tmp_path)}
    model, kernels = checks.folders(environment)
    assert model.state is State.BAD and "HF_HOME" in model.advice
    assert kernels.state is State.GOOD


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "")
        self.send_response(200 if token in ("", "Bearer good") else 401)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


def test_the_hub_and_its_token() -> None:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    at = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    try:
        assert one(checks.hub(at)).state is State.GOOD
        assert "with a token" in one(checks.hub(at | {"HF_TOKEN": "good"})).text
        refused = one(checks.hub(at | {"HUGGINGFACE_HUB_TOKEN": "bad"}))
        assert refused.state is State.BAD and "refuses the token" in refused.text
    finally:
        server.shutdown()
        server.server_close()
    unreachable = one(checks.hub(at))
    assert unreachable.state is State.NOTE and "cannot be reached" in unreachable.text
    assert "HF_HUB_OFFLINE" in one(checks.hub({"HF_HUB_OFFLINE": "1"})).text


def test_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    good = Finding(State.GOOD, "a", "fine")
    assert doctor.show([good, Finding(State.NOTE, "b", "so so", "do")]) == 0
    assert "nothing to be put right" in capsys.readouterr().out
    assert doctor.show([good, Finding(State.BAD, "b", "broken", "mend it")]) == 1
    assert "→ mend it\n\n1 to be put right" in capsys.readouterr().out
