"""Faults while the server comes up, and faults of what is around it: files, disk, port.

Before the first token there is nobody to serve: whatever goes wrong then ends the server at once,
with a status that a service manager acts on, and leaves nothing behind. CASES 95 and 97.
"""

import os
import re
import shutil
import signal
import socket
import sys
import time
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
@pytest.mark.parametrize("role", ROLES)
def test_case_95_stopped_while_loading(start: Start, nothing_left: NothingLeft, role: str) -> None:
    server = start("--hang-timeout", "2")
    pids = loading(server)
    began = time.monotonic()
    os.kill(server.pid_of(role), signal.SIGSTOP)
    assert server.process.wait(40) == 1
    print(f"{role}, stopped while loading: exit 1 after {time.monotonic() - began:.1f} s")
    assert nothing_left(pids)
    assert f"zlm: {role} 0 has not run for" in server.log.read_text().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ROLES)
def test_case_95_a_successor_is_lost_while_it_loads(
    start: Start, nothing_left: NothingLeft, role: str, fault: int
) -> None:
    server = start("--hang-timeout", "2", "--api-server-count", "2").wait_ready()
    first = server.pids()

    def successor() -> int:
        now = server.pids()
        new = (pid for pid in now if pid not in first and f"zlm.{role}.process" in now[pid])
        return next(new, 0)

    opened = start_load(server)
    began = time.monotonic()
    os.kill(server.pid_of(role), signal.SIGKILL)
    assert eventually_true(lambda: successor() > 0, 20)
    lost = successor()
    os.kill(lost, fault)
    assert {request.outcome() for request in opened} <= {"error", "cut", "done"}
    assert eventually_true(lambda: lost not in server.pids(), 60)
    assert eventually_true(lambda: successor() > 0 and server.health() == 200, 60)
    assert eventually_true(lambda: server.complete([1, 2], max_tokens=2).status == 200, 60)
    print(f"{role}, lost twice ({fault}): serves after {time.monotonic() - began:.1f} s")
    pids = server.pids()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(40) == 0
    assert nothing_left(pids)


def test_a_start_that_lives_and_never_ends(
    model: Path, tmp_path: Path, nothing_left: NothingLeft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDLESS_START", "1")
    program = [sys.executable, str(Path(__file__).with_name("faulty_server.py"))]
    flags = ["--max-model-len", "512", "--startup-timeout", "5"]
    server = Server(model, tmp_path / "log", flags, program=program)
    try:
        pids = server.pids()
        assert server.process.wait(60) == 1
    finally:
        server.stop()
    assert nothing_left(pids)
    log = server.log.read_text()
    assert re.fullmatch(r"zlm: worker 0 has made no progress for \d+ s", log.splitlines()[-1])
    assert "in wait_for_ever" in log, "the stacks show where it hangs"


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "model.safetensors"]
)  # read by the supervisor, the supervisor and the tokenizer, the worker
def test_a_model_that_cannot_be_read(
    start: Start, nothing_left: NothingLeft, model: Path, tmp_path: Path, file: str
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / file).write_bytes((damaged / file).read_bytes()[:100])
    server = start(model=damaged)
    pids = server.pids()
    assert server.process.wait(40) == 1
    assert nothing_left(pids)
    last = server.log.read_text().splitlines()[-1]
    assert last.startswith("zlm: ") and file in last


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


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_for_logs_changes_nothing(
    model: Path, nothing_left: NothingLeft, form: str
) -> None:
    flags = ["--served-model-name", "smol", "--max-model-len", "512", "--log-format", form]
    server = Server(model, Path("/dev/full"), flags)
    try:
        assert eventually_true(lambda: server.health() == 200, 60)
        opened = start_load(server, streams=1, wholes=1)
        os.kill(server.pid_of("engine"), signal.SIGKILL)
        assert {request.outcome() for request in opened} == {"error"}
        # /health may be asked before the front end has heard of the death.
        again = eventually_true(lambda: server.complete([1, 2, 3], max_tokens=2).status == 200, 60)
        assert again
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
