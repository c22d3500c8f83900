"""Death, drain and start of the whole tree: CASES 95, 96, 97."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

Eventually = Callable[[Callable[[], bool], float], bool]
StillAlive = Callable[[dict[int, str]], list[str]]
ROLES = ("frontend", "tokenizer", "engine", "worker")


def read_to_end(raw: socket.socket) -> bytes:
    received = b""
    while chunk := raw.recv(65536):
        received += chunk
    return received


def read_some(raw: socket.socket) -> bytes:
    """Read until the first data event is there."""
    received = b""
    while b"data: {" not in received:
        chunk = raw.recv(65536)
        assert chunk, received
        received += chunk
    return received


def wait(server: Any, seconds: float) -> int:
    status: int = server.process.wait(timeout=seconds)
    return status


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_case_95_a_killed_process_is_an_error_and_a_failure(
    start_server: Callable[..., Any], still_alive: StillAlive, role: str
) -> None:
    server = start_server("--max-restarts", "0").wait_ready()  # with restarts: tests/faults
    pids = server.pids()
    assert all(any(f"zlm.{r}.process" in line for line in pids.values()) for r in ROLES)
    raw = server.open_stream("Once upon a time", max_tokens=900, ignore_eos=True)
    received = read_some(raw)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.complete, "Hello", max_tokens=900, ignore_eos=True)
        os.kill(server.pid_of(role), signal.SIGKILL)
        received += read_to_end(raw)
        assert b'data: {"error":' in received and b"[DONE]" not in received
        answer = whole.result(timeout=10)
        assert answer.status in (500, 503) and answer.json["error"]["message"]
    assert wait(server, 10) > 0
    assert not still_alive(pids)


def test_case_96_sigterm_lets_running_requests_finish(
    start_server: Callable[..., Any], still_alive: StillAlive, eventually: Eventually
) -> None:
    server = start_server().wait_ready()
    pids = server.pids()
    raw = server.open_stream("Once upon a time", max_tokens=60, ignore_eos=True)
    received = read_some(raw)
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: server.health() in (0, 503), 2)
    with contextlib.suppress(ConnectionError):  # refused is as good
        assert server.complete("Hello", max_tokens=1).status == 503
    received += read_to_end(raw)
    assert b"data: [DONE]" in received
    assert b'"finish_reason":"length"' in received.replace(b": ", b":")
    assert wait(server, 10) == 0
    assert not still_alive(pids)


def test_case_96_a_second_sigterm_aborts(
    start_server: Callable[..., Any], still_alive: StillAlive, eventually: Eventually
) -> None:
    server = start_server().wait_ready()
    pids = server.pids()
    raw = server.open_stream("Once upon a time", max_tokens=1000, ignore_eos=True)
    received = read_some(raw)
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: server.health() in (0, 503), 2)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    received += read_to_end(raw)
    assert b'data: {"error":' in received and b"[DONE]" not in received
    assert wait(server, 10) == 0
    assert time.monotonic() - start < 8
    assert not still_alive(pids)


def test_case_96_sigterm_while_loading(
    start_server: Callable[..., Any], still_alive: StillAlive, eventually: Eventually
) -> None:
    server = start_server()
    assert eventually(lambda: len(server.pids()) > len(ROLES), 20)
    pids = server.pids()
    server.process.send_signal(signal.SIGTERM)
    assert wait(server, 15) == 0
    assert not still_alive(pids)


def test_case_97_kill_9_leaves_nothing_and_a_start_right_after_works(
    start_server: Callable[..., Any], still_alive: StillAlive, eventually: Eventually
) -> None:
    """CASES 97, and 22: without a seed two servers do not say the same."""
    server = start_server().wait_ready()
    pids = server.pids()
    assert len(pids) >= 1 + len(ROLES)
    drawn = server.complete("Hello", temperature=1, max_tokens=12).text
    raw = server.open_stream("Once upon a time", max_tokens=900, ignore_eos=True)
    read_some(raw)
    server.process.kill()
    assert wait(server, 5) == -signal.SIGKILL
    assert eventually(lambda: not still_alive(pids), 10), still_alive(pids)
    raw.close()
    again = start_server(port=server.port).wait_ready()
    again.assert_good()
    assert again.complete("Hello", temperature=1, max_tokens=12).text != drawn, "CASE 22"


def test_a_taken_port_fails_before_anything_loads(
    server: Any, start_server: Callable[..., Any]
) -> None:
    start = time.monotonic()
    second = start_server("--port", str(server.port))
    assert wait(second, 10) > 0
    assert time.monotonic() - start < 5
    assert str(server.port) in second.log.read_text()
