"""Faults while the server comes up, and faults of what is around it: files, disk, port.

Before the first token there is nobody to serve: whatever goes wrong then ends the server at once,
with a status that a service manager acts on, and leaves nothing behind. CASES 95 and 97.
"""

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_load import start_load
from running_server import Server, eventually_true

Start = Callable[..., Server]
NothingLeft = Callable[[dict[int, str]], bool]
ROLES = ("frontend", "tokenizer", "engine", "worker")


def loading(server: Server) -> dict[int, str]:
    """Return the processes of a server that has just spawned them."""

    def spawned() -> bool:
        lines = server.pids().values()
        return all(any(f"zlm.{role}.process" in line for line in lines) for role in ROLES)

    assert eventually_true(spawned, 20)
    return server.pids()


@pytest.mark.parametrize("role", ROLES)
def test_case_95_killed_while_loading(start: Start, nothing_left: NothingLeft, role: str) -> None:
    server = start()
    pids = loading(server)
    os.kill(server.pid_of(role), signal.SIGKILL)
    assert server.process.wait(20) == 1
    assert nothing_left(pids)
    assert server.log.read_text().splitlines()[-1] == (
        f"zlm: {role} 0 died: killed by signal 9 (SIGKILL)"
    )


@pytest.mark.slow
def test_case_95_stopped_while_loading(start: Start, nothing_left: NothingLeft) -> None:
    server = start("--hang-timeout", "2")
    pids = loading(server)
    os.kill(server.pid_of("engine"), signal.SIGSTOP)
    assert server.process.wait(40) == 1
    assert nothing_left(pids)
    assert "zlm: engine 0 has not run for" in server.log.read_text().splitlines()[-1]


def test_a_model_that_cannot_be_read(
    start: Start, nothing_left: NothingLeft, model: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    weights = next(damaged.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    server = start(model=damaged)
    pids = server.pids()
    assert server.process.wait(40) == 1
    assert nothing_left(pids)
    assert server.log.read_text().splitlines()[-1].startswith("zlm: ")


def test_a_model_that_is_gone_when_it_is_needed_again(
    start: Start, nothing_left: NothingLeft, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    server = start("--max-restarts", "1", model=copy).wait_ready()
    pids = server.pids()
    opened = start_load(server, streams=1, wholes=1)
    shutil.rmtree(copy)
    os.kill(server.pid_of("worker"), signal.SIGKILL)
    assert {request.outcome() for request in opened} == {"error"}
    assert server.process.wait(40) == 1
    assert nothing_left(pids)
    last = server.log.read_text().splitlines()[-1]
    assert last.startswith("zlm: worker 0 could not start") and "failed too often" in last


def test_a_full_disk_for_logs_changes_nothing(model: Path, nothing_left: NothingLeft) -> None:
    flags = ["--served-model-name", "smol", "--max-model-len", "512"]
    server = Server(model, Path("/dev/full"), flags)
    try:
        assert eventually_true(lambda: server.health() == 200, 60)
        opened = start_load(server, streams=1, wholes=1)
        os.kill(server.pid_of("engine"), signal.SIGKILL)
        assert {request.outcome() for request in opened} == {"error"}
        assert eventually_true(lambda: server.health() == 200, 60)
        assert server.complete([1, 2, 3], max_tokens=2).status == 200
        pids = server.pids()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert nothing_left(pids)
    finally:
        server.stop()


def test_a_taken_port(start: Start, nothing_left: NothingLeft) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start("--port", str(taken.getsockname()[1]))
        pids = server.pids()
        assert server.process.wait(20) == 1
        assert nothing_left(pids)
        assert "is taken by another program" in server.log.read_text()


def test_case_97_nothing_is_left_in_whatever_order_they_are_killed(
    start: Start, nothing_left: NothingLeft
) -> None:
    """A child, then the supervisor, while the child's successor comes up."""
    shared = set(Path("/dev/shm").iterdir())
    server = start().wait_ready()
    os.kill(server.pid_of("engine"), signal.SIGKILL)
    assert eventually_true(lambda: server.health() == 503, 10)
    pids = server.pids()
    os.kill(server.pid_of("tokenizer"), signal.SIGKILL)
    server.process.kill()
    assert server.process.wait(10) == -signal.SIGKILL
    assert nothing_left(pids)
    assert set(Path("/dev/shm").iterdir()) <= shared
