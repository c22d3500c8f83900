"""The life of a server: coming up, draining, failing; the real supervisor over fake processes.

CASES 95, 96 and 97, as far as the supervisor goes.
"""

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_tree import PATIENCE_SECONDS, Server

CHILDREN = [("engine", 0), ("frontend", 0), ("frontend", 1), ("tokenizer", 0), ("worker", 0)]


Start = Callable[..., Server]


def test_comes_up_and_drains(serve: Start) -> None:
    server = serve()
    log = "\n".join(server.lines)
    assert re.search(r"INFO    supervisor ready in \d+\.\d\d s\n", log)
    for part in (" {14}reading the model", "worker 0", "engine 0", "tokenizer 0", "frontend 1"):
        assert re.search(rf"supervisor {part} .* \d+\.\d\d +\d+\.\d\d +\d+\n", log), part
    assert "worker 0: weights 50%" in log and "engine 0 is ready: a detail" in log
    assert [e[1:] for e in server.events("launch")] == [[*c, "/models/tiny"] for c in CHILDREN]
    port = int(server.lines[-1].rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()

    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert [e[1:3] for e in server.events("drain")] == [["frontend", 0], ["frontend", 1]]
    assert [e[1:3] for e in server.events("stop")] == [list(child) for child in CHILDREN]
    assert server.events("abort") == []
    states = [
        e[0] for e in server.events("loading", "ready", "draining") if e[1:3] == ["frontend", 0]
    ]
    assert {*states[:-2]} == {"loading"} and states[-2:] == ["ready", "draining"]
    reasons = {e[3] for e in server.events("loading")}
    assert {
        "the model is being loaded",
        "the model is being loaded (worker: weights 50%)",
    } <= reasons


def test_ctrl_c_drains_too_and_no_one_connects_any_more(serve: Start) -> None:
    server = serve(behaviour={"frontend": ["busy"]})
    port = int(server.lines[-1].rpartition(":")[2])
    server.signal(signal.SIGINT)
    server.until("draining: open requests may finish within 60 s")
    server.signal(signal.SIGINT)
    assert server.end() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_requests_that_outlast_the_timeout_are_aborted_with_an_answer(serve: Start) -> None:
    server = serve(behaviour={"frontend": ["busy"]}, options={"shutdown_timeout_seconds": 0.2})
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert [e[1:3] for e in server.events("abort")] == [["frontend", 0], ["frontend", 1]]
    assert len(server.events("stop")) == len(CHILDREN)


def test_second_signal_aborts_at_once(serve: Start) -> None:
    server = serve(behaviour={"frontend": ["busy"]})  # the timeout is 60 s
    server.signal(signal.SIGTERM)
    server.until("draining")
    server.signal(signal.SIGTERM)
    server.until("ending open requests with an error: the server is shutting down")
    assert server.end() == 0
    assert len(server.events("abort")) == 2


def test_third_signal_kills(serve: Start) -> None:
    server = serve(behaviour={"frontend": ["stuck"], "worker": ["deaf to stop"]})
    server.signal(signal.SIGTERM)
    server.until("draining")
    server.signal(signal.SIGTERM)
    server.until("ending open requests")
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_who_does_not_leave_is_killed(serve: Start) -> None:
    server = serve(behaviour={"worker": ["deaf to stop"]})
    server.signal(signal.SIGTERM)
    server.until("killing what has not left: worker 0")
    assert server.end() == 0


@pytest.mark.parametrize("resolver", ["model", "never"])
def test_signal_while_loading_ends_at_once_with_0(start: Start, resolver: str) -> None:
    server = start(behaviour={"worker": ["not ready"]}, resolver=resolver)
    server.until("worker 0: weights 50%" if resolver == "model" else "loading tiny-model")
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert server.events("stop") == []


@pytest.mark.parametrize("role", ["worker", "engine", "tokenizer"])
def test_death_of_a_process_answers_requests_and_is_the_last_line(serve: Start, role: str) -> None:
    server = serve(behaviour={"frontend": ["busy"]}, options={"max_restarts": 0})
    os.kill(server.pids()[role], signal.SIGKILL)
    assert server.end() == 1
    assert server.lines[-1] == f"zlm: {role} 0 died: killed by signal 9 (SIGKILL)"
    assert len(server.events("abort")) == 2
    reasons = {e[3] for e in server.events("draining")}
    assert len(reasons) == 1 and f"{role} 0 died" in reasons.pop()


def test_death_of_a_frontend_lets_the_other_answer(serve: Start) -> None:
    server = serve(behaviour={"frontend": ["busy"]}, options={"max_restarts": 0})
    os.kill(server.pids()["frontend"], signal.SIGKILL)
    assert server.end() == 1
    assert server.lines[-1] == "zlm: frontend 0 died: killed by signal 9 (SIGKILL)"
    assert [e[1:3] for e in server.events("abort")] == [["frontend", 1]]


def test_death_while_draining_is_a_failure(serve: Start) -> None:
    server = serve(behaviour={"frontend": ["busy"]})
    server.signal(signal.SIGTERM)
    server.until("draining")
    os.kill(server.pids()["engine"], signal.SIGKILL)
    assert server.end() == 1
    assert server.lines[-1] == "zlm: engine 0 died: killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("behaviour", "last"),
    [
        ("exit at launch", "zlm: worker 0 died: exited with status 3"),
        ("fatal at launch", r"zlm: worker 0 could not start: tensor x is missing\nfrom the file"),
    ],
)
def test_failure_while_loading(start: Start, behaviour: str, last: str) -> None:
    server = start(behaviour={"worker": [behaviour]})
    assert server.end() == 1
    assert server.lines[-1] == last


@pytest.mark.parametrize(
    ("resolver", "last"),
    [
        ("error", "zlm: tiny-model is neither a folder nor a file"),
        ("bug", "zlm: reading the model failed: KeyError: 'hidden_size'"),
    ],
)
def test_a_model_that_cannot_be_read(start: Start, resolver: str, last: str) -> None:
    server = start(resolver=resolver)
    assert server.end() == 1
    assert server.lines[-1] == last
    assert any("Traceback" in line for line in server.lines) == (resolver == "bug")


def test_taken_port_fails_before_anything_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(options={"port": port})
        assert server.end() == 1
    assert server.lines[-1].startswith(f"zlm: --port {port} on 127.0.0.1 is taken")
    assert server.events("pid") == []


def test_kill_of_the_supervisor_leaves_no_process_and_a_start_right_after_works(
    serve: Start,
) -> None:
    server = serve()
    port = int(server.lines[-1].rpartition(":")[2])
    server.signal(signal.SIGKILL)
    assert server.end() == -signal.SIGKILL
    again = serve(options={"port": port})
    assert again.lines[-1].endswith(f"serving tiny-model on http://127.0.0.1:{port}")
    again.signal(signal.SIGTERM)
    assert again.end() == 0


def test_service_manager_is_told(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = str(tmp_path / "notify")
        manager.bind(path)
        manager.settimeout(PATIENCE_SECONDS)
        server = start(environment={"NOTIFY_SOCKET": path})
        told = ""
        while "READY=1" not in told:
            told += manager.recv(4096).decode() + "\n"
        assert told.startswith("STATUS=loading tiny-model\n")
        assert "STATUS=downloading tiny-model: 35% of 5.0 GB\n" in told
        assert "STATUS=worker: weights 50%\n" in told
        serving = r"READY=1\nMAINPID=\d+\nSTATUS=serving tiny-model on http://127.0.0.1:\d+\n"
        assert re.search(serving, told)
        server.signal(signal.SIGTERM)
        assert manager.recv(4096).startswith(b"STOPPING=1\nSTATUS=shutting down")
        assert server.end() == 0


def test_everyone_is_warned_of_an_open_server(start: Start) -> None:
    server = start(options={"host": "0.0.0.0"})
    server.until("anyone who reaches this machine may use the server: no --api-key")


def test_log_lines_have_their_form(serve: Start) -> None:
    server = serve()
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    form = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO|WARNING|ERROR) +supervisor ")
    assert all(form.match(line) for line in server.lines), server.lines
