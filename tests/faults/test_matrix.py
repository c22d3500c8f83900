"""The fault matrix: each process, killed or stopped, idle or at work; and each comes back.

Every open request gets exactly one answer, and the service works again by itself. CASE 95, with
the decision that zlm replaces what has died where it can (tests/e2e has the exit without that).
The times to recovery are printed: ``pytest tests/faults -s``.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest
from fault_load import start_load
from running_server import Server, eventually_true

ROLES = ("frontend", "tokenizer", "engine", "worker")
RECOVERY_SECONDS = 60.0
FLAGS = ["--served-model-name", "smol", "--max-model-len", "512", "--max-restarts", "100",
    "--hang-timeout", "3", "--health-timeout", "2"]  # fmt: skip
NUMBERS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, tmp_path_factory.mktemp("matrix") / "log", FLAGS) as running:
        yield running
        pids = running.pids()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        assert eventually_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)


def works(server: Server) -> bool:
    try:
        return server.complete([1, 2, 3], max_tokens=2).status == 200 and server.health() == 200
    except (OSError, HTTPException):
        return False


def recover(server: Server, what: str, since: float) -> None:
    """Wait until the service works again and print how long that took."""
    assert eventually_true(lambda: works(server), RECOVERY_SECONDS), server.log.read_text()[-4000:]
    print(f"recovery: {what}: {time.monotonic() - since:.2f} s")


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("role", ROLES)
def test_case_95_streaming(server: Server, role: str, fault: str) -> None:
    assert eventually_true(lambda: works(server), RECOVERY_SECONDS)
    opened = start_load(server)
    since = time.monotonic()
    broken = server.pid_of(role)
    os.kill(broken, NUMBERS[fault])
    outcomes = [request.outcome() for request in opened]
    # A front end takes its connections with it; all others leave someone who can tell. What is
    # stopped is continued, to write its stacks, before it is killed: it may end what it had.
    expected = {"cut" if role == "frontend" else "error"}
    assert set(outcomes) == expected if fault == "kill" else set(outcomes) <= expected | {"done"}
    assert eventually_true(lambda: broken not in server.pids(), 10)
    recover(server, f"{role}, {fault}, streaming", since)
    running = server.metric("vllm:num_requests_running")
    assert running == 0, "requests nobody waits for are given up"


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ROLES)
def test_case_95_idle(server: Server, role: str, fault: str) -> None:
    assert eventually_true(lambda: works(server), RECOVERY_SECONDS)
    since = time.monotonic()
    broken = server.pid_of(role)
    os.kill(broken, NUMBERS[fault])
    assert eventually_true(lambda: broken not in server.pids(), 20)
    recover(server, f"{role}, {fault}, idle", since)


def test_killed_again_while_it_comes_up(server: Server) -> None:
    first = server.pid_of("worker")
    since = time.monotonic()
    os.kill(server.pid_of("engine"), signal.SIGKILL)

    def successor() -> int:
        pids = server.pids()
        return next((p for p in pids if p != first and "zlm.worker.process" in pids[p]), 0)

    assert eventually_true(lambda: successor() > 0, 20)
    answer = server.complete([1, 2, 3])
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert "engine 0 died" in answer.json["error"]["message"]
    assert server.request("GET", "/health/live").status == 200
    os.kill(successor(), signal.SIGKILL)
    recover(server, "engine, then the worker while it loads", since)


def test_all_at_once(server: Server) -> None:
    opened = start_load(server)
    since = time.monotonic()
    for pid in [server.pid_of(role) for role in ROLES]:
        with contextlib.suppress(ProcessLookupError):  # its unit was taken down meanwhile
            os.kill(pid, signal.SIGKILL)
    assert {request.outcome() for request in opened} == {"cut"}
    recover(server, "all four, kill, streaming", since)


def test_what_was_counted_outlives_who_counted_it(server: Server) -> None:
    before = server.metrics()
    os.kill(server.pid_of("engine"), signal.SIGKILL)
    assert eventually_true(lambda: server.health() == 503, 10)
    assert eventually_true(lambda: server.health() == 200, RECOVERY_SECONDS)
    after = server.metrics()
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"]
    restarts = "zlm:engine_restarts_total"
    assert after[restarts] == before[restarts] + 1
