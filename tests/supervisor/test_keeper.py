"""What the supervisor does about processes that die or hang; over fake processes.

CASES 95, as far as the supervisor goes.
"""

import os
import re
import signal
import socket
from collections.abc import Callable

import pytest
from fake_tree import PATIENCE_SECONDS, Server
from running_server import eventually_true

Start = Callable[..., Server]


def kill(server: Server, role: str, number: int = signal.SIGKILL) -> int:
    """Send a signal to the newest process of *role*; return its id."""
    pid = server.pids()[role]
    os.kill(pid, number)
    return pid


def end(server: Server) -> None:
    server.signal(signal.SIGTERM)
    assert server.end() == 0


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_case_95_engine_and_worker_come_back_together(serve: Start, role: str) -> None:
    server = serve()
    before = server.pids()
    kill(server, role)
    server.until(f"{role} 0 died: killed by signal 9 (SIGKILL); restarting it now")
    server.until("serving again")
    after = server.pids()
    assert {r for r in before if before[r] != after[r]} == {"engine", "worker"}
    assert [e[1:] for e in server.events("peer lost")] == [["tokenizer", 0, ["engine", 0, 0]]]
    states = [e for e in server.events("restarting") if e[1] == "frontend"]
    assert [e[2] for e in states] == [0, 1] and f"{role} 0 died" in states[0][3]
    end(server)
    # A token has come round before clients are let in again, and the engine counts from there.
    assert len(server.events("probe")) == 4
    ready = [(e[1], e[2]) for e in server.events("ready")]
    assert ready[-4:] == [("frontend", 0)] * 2 + [("frontend", 1)] * 2
    assert ready[0] == ("engine", 0)  # the former one may have died before it heard


def test_a_tokenizer_is_replaced_and_everybody_is_told(serve: Start) -> None:
    server = serve(options={"tokenizer_pool_size": 2})
    kill(server, "tokenizer")
    server.until("tokenizer 0 is back")
    lost = [["engine", 0], ["frontend", 0], ["frontend", 1]]
    assert [e[1:3] for e in server.events("peer lost")] == lost
    end(server)
    assert [e[1:] for e in server.events("peer up")] == [
        [*name, ["tokenizer", 0, 1]] for name in lost
    ]
    assert server.events("restarting") == []


def test_a_front_end_is_replaced_on_the_same_socket(serve: Start) -> None:
    server = serve()
    port = int(server.lines[-1].rpartition(":")[2])
    # It is to have heard that all are ready before it dies.
    assert eventually_true(lambda: ["frontend", 0] in [e[1:3] for e in server.events("ready")], 30)
    kill(server, "frontend")
    server.until("frontend 0 is back")
    socket.create_connection(("127.0.0.1", port)).close()
    end(server)
    assert [e[1:] for e in server.events("peer lost")] == [["tokenizer", 0, ["frontend", 0, 0]]]
    assert [e[1:] for e in server.events("peer up")] == [["tokenizer", 0, ["frontend", 0, 1]]]
    told = [e[0] for e in server.events("loading", "ready") if e[1:3] == ["frontend", 0]]
    assert told.count("ready") == 2  # the successor is told what the others know
    assert [e[1:3] for e in server.events("drain")] == [["frontend", 0], ["frontend", 1]]


def test_who_fails_again_and_again_ends_the_server(serve: Start) -> None:
    server = serve(behaviour={"worker": ["dies again"]}, options={"max_restarts": 2})
    kill(server, "worker")
    server.until("restarting it now")
    server.until("worker 0 died: exited with status 3; restarting it in 1 s")
    assert server.end() == 1
    last = "zlm: worker 0 died: exited with status 3; it has failed too often"
    assert server.lines[-1] == last
    assert len(server.events("abort")) == 2  # what was open has been answered


def test_a_signal_while_the_engine_is_restarted_ends_with_0(serve: Start) -> None:
    server = serve(behaviour={"worker": ["dies again"]})
    kill(server, "engine")
    server.until("restarting it in 1 s")
    end(server)


@pytest.mark.parametrize("role", ["engine", "worker", "tokenizer", "frontend"])
def test_case_95_who_is_stopped_is_replaced_and_all_stacks_are_in_the_log(
    serve: Start, role: str
) -> None:
    server = serve(options={"hang_timeout_seconds": 2})
    stopped = kill(server, role, signal.SIGSTOP)
    server.until(f"{role} 0 has ")  # not run, or made no progress
    back = "serving again" if role in ("engine", "worker") else f"{role} 0 is back"
    server.until(back)
    log = "\n".join(server.lines)
    for name in ("engine 0", "worker 0", "tokenizer 0", "frontend 0", "frontend 1"):
        assert re.search(rf"stacks of {name} \(process \d+\):\n(.*\n)*?.*fake_role\.py", log), name
    assert "stacks of the supervisor" in log
    assert server.pids()[role] != stopped
    end(server)


@pytest.mark.parametrize(
    ("keywords", "last_news", "who"),
    [
        ({"behaviour": {"worker": ["not ready"]}}, "worker 0: weights", "worker 0"),
        ({"behaviour": {"tokenizer": ["not ready"]}}, "tokenizer 0: weights", "tokenizer 0"),
        ({"resolver": "never"}, "downloading", "reading the model"),
    ],
)
def test_a_start_that_lives_and_never_ends_is_given_up(
    start: Start, keywords: dict[str, object], last_news: str, who: str
) -> None:
    server = start(options={"startup_timeout_seconds": 4}, **keywords)
    server.until(last_news)
    assert server.end() == 1
    assert re.fullmatch(rf"zlm: {who} has made no progress for \d+ s", server.lines[-1])
    stuck = "the supervisor" if who == "reading the model" else rf"{who} \(process \d+\)"
    assert re.search(rf"stacks of {stuck}:\n(Thread|Current)", "\n".join(server.lines))
    assert server.events("probe") == []


def test_who_never_ends_its_start_again_and_again_ends_the_server(serve: Start) -> None:
    options = {"startup_timeout_seconds": 4, "max_restarts": 1}
    server = serve(behaviour={"worker": ["never again"]}, options=options)
    kill(server, "engine")
    assert server.end() == 1
    last = r"zlm: worker 0 has made no progress for \d+ s; it has failed too often"
    assert re.fullmatch(last, server.lines[-1])


def test_a_first_token_that_does_not_come_is_a_failure_to_start(start: Start) -> None:
    server = start(behaviour={"frontend": ["no token"]})
    assert server.end() == 1
    assert server.lines[-1] == "zlm: engine 0 does not work: the first token is NaN"
    assert not any("serving" in line for line in server.lines)


def test_all_die_at_once_and_all_come_back(serve: Start) -> None:
    server = serve(options={"api_server_count": 1})
    pids = server.pids()
    for role in ("frontend", "engine", "tokenizer", "worker"):
        os.kill(pids[role], signal.SIGKILL)
    server.until("serving again")
    end(server)
    assert not set(pids.values()) & set(server.pids().values())


def test_the_watchdog_is_fed_while_all_get_on(start: Start, tmp_path: object) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = f"{tmp_path}/notify"
        manager.bind(path)
        manager.settimeout(PATIENCE_SECONDS)
        server = start(environment={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "600000"})
        told = ""
        while "READY=1" not in told or not told.endswith("WATCHDOG=1\n" * 2):
            told += manager.recv(4096).decode() + "\n"
        assert "WATCHDOG=1" not in told.partition("READY=1")[0]
        end(server)
