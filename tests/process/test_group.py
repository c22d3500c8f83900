"""Children of a ProcessGroup: starting, stopping, failing, and dying with their parent."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from zlm.ipc.sockets import Inbox, address
from zlm.messages import Drain, Drained, Fatal, Progress, Ready, Stop, ToSupervisor
from zlm.process.heartbeat import HeartbeatReader
from zlm.process.launch import Death, ProcessGroup
from zlm.process.runtime import RuntimeDirectory

HERE = Path(__file__).parent
PATIENCE_SECONDS = 20.0


def fake_command(role: str) -> list[str]:
    return [sys.executable, "-P", str(HERE / "fake_child.py"), role]


class Parent:
    """A group of fake children with the parent's inbox."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.context = zmq.Context()
        self.inbox = Inbox(self.context, address(runtime, "supervisor"), ToSupervisor)
        self.group = ProcessGroup(runtime, self.context, command=fake_command)
        self._messages: list[Any] = []

    def spawn(self, role: str, **keywords: Any) -> dict[str, Any]:
        """Start a child, wait until it is ready and return the facts it gives."""
        self.group.spawn(role, 0, **keywords)
        detail = self.next(Ready).detail
        return json.loads(detail) if detail else {}

    def next(self, kind: type) -> Any:
        """Return the next message, which must be of *kind*."""
        if not self._messages:
            self._messages = self.inbox.receive(int(PATIENCE_SECONDS * 1000))
        assert self._messages, f"no {kind.__name__} came"
        message = self._messages.pop(0)
        assert isinstance(message, kind), message
        return message

    def death(self) -> Death:
        """Wait for the next death."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (deaths := self.group.poll()):
            assert time.monotonic() < deadline, "no child died"
            select.select([], [], [], 0.01)
        return deaths[0]

    def close(self) -> None:
        self.group.kill()
        self.context.destroy()


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    with RuntimeDirectory({"RUNTIME_DIRECTORY": str(tmp_path)}) as directory:
        parent = Parent(directory.path)
        yield parent
        parent.close()


def test_child_is_set_up(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in ("ZLM_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(secret, "secret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    facts = parent.spawn("serve", env={"GIVEN": "1"})
    assert facts["pid"] == parent.group.pid("serve")
    assert facts["name"] == "zlm: serve"
    assert facts["stdin"] == "/dev/null"
    assert facts["ignored"] == [True, True]
    assert facts["blocked"] == 0
    assert "GIVEN" in facts["environment"]
    absent = {"ZLM_API_KEY", "HF_TOKEN", "NOTIFY_SOCKET", "ZLM_LIFELINE_FD"}
    assert not absent & set(facts["environment"])


def test_stop_lets_children_leave_with_their_last_words(parent: Parent) -> None:
    parent.spawn("serve")
    assert parent.group.stop(PATIENCE_SECONDS) == [Death("serve", 0, 0)]
    assert parent.next(Progress).text == "last words"
    assert parent.group.alive == []
    assert parent.group.stop(PATIENCE_SECONDS) == []


def test_stop_kills_stragglers(parent: Parent) -> None:
    parent.spawn("serve")
    parent.spawn("deaf")
    deaths = parent.group.stop(0.5)
    assert sorted((d.role, d.status) for d in deaths) == [("deaf", -signal.SIGKILL), ("serve", 0)]


def test_signals_at_any_moment_do_not_end_a_child(parent: Parent) -> None:
    parent.group.spawn("serve", 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the interpreter is starting
        os.kill(parent.group.pid("serve"), number)
    parent.next(Ready)
    os.kill(parent.group.pid("serve"), signal.SIGINT)
    parent.group.send("serve", 0, Drain())
    parent.next(Drained)


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("break_down", "ValueError: first line\nsecond line"),
        ("refuse", "the checkpoint is damaged"),
        ("break_in_thread", "ValueError: first line\nsecond line"),
    ],
)
def test_exception_is_told_and_ends_the_child(
    parent: Parent, role: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parent.group.spawn(role, 0)
    assert parent.next(Fatal) == Fatal(role, 0, text)
    assert parent.death() == Death(role, 0, 1)
    lines = capfd.readouterr().err.splitlines()
    assert all(f"ERROR   {role} " in line for line in lines)
    assert any("Traceback" in line for line in lines) == (role != "refuse")


def test_exception_in_async_handler_ends_the_child(parent: Parent) -> None:
    parent.spawn("break_in_handler")
    parent.group.send("break_in_handler", 0, Drain())
    assert parent.next(Fatal).text == "KeyError: 'unknown request'"
    assert parent.death().status == 1


def test_killed_child_is_reported_once(parent: Parent) -> None:
    facts = parent.spawn("serve")
    os.kill(facts["pid"], signal.SIGKILL)
    death = parent.death()
    assert death == Death("serve", 0, -signal.SIGKILL)
    assert death.describe() == "killed by signal 9 (SIGKILL)"
    assert parent.group.poll() == [] and parent.group.alive == []


def test_child_outlives_the_thread_that_launched_it(parent: Parent) -> None:
    thread = threading.Thread(target=parent.spawn, args=("serve",))
    thread.start()
    thread.join()
    tid = thread.native_id
    while Path(f"/proc/self/task/{tid}").exists():  # the kernel's thread ends after join returns
        os.sched_yield()
    parent.group.send("serve", 0, Drain())
    parent.next(Drained)
    assert parent.group.poll() == []


def test_heartbeat_is_read_across_processes(parent: Parent) -> None:
    facts = parent.spawn("serve")
    reader = HeartbeatReader(parent.runtime)
    before = reader.beat("serve")
    assert before is not None and not before.work_pending and before.steps == 0
    parent.group.send("serve", 0, Drain())
    parent.next(Drained)
    after = reader.beat("serve")
    assert after is not None and after.work_pending and after.steps == 1
    assert after.pid == facts["pid"]
    assert before.last_loop_ns < after.last_loop_ns <= time.monotonic_ns()
    assert reader.beat("serve", 1) is None and len(reader.beats()) == 1


@pytest.mark.parametrize(
    ("roles", "stopped"),
    [(["serve", "deaf"], False), (["serve_by_lifeline"], False), (["serve"], True)],
    ids=["both means", "the lifeline alone", "PDEATHSIG alone: a stopped child"],
)
def test_children_die_with_a_killed_parent(tmp_path: Path, roles: list[str], stopped: bool) -> None:
    with RuntimeDirectory({"RUNTIME_DIRECTORY": str(tmp_path)}) as directory:
        reading, writing = os.pipe()
        command = [sys.executable, str(HERE / "fake_parent.py"), str(directory.path), str(writing)]
        with subprocess.Popen(
            command + roles, pass_fds=(writing,), stdout=subprocess.PIPE, text=True
        ) as process:
            os.close(writing)
            assert process.stdout is not None
            pids = json.loads(process.stdout.readline())
            if stopped:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
            process.kill()
        gone, _, _ = select.select([reading], [], [], PATIENCE_SECONDS)
        assert gone and os.read(reading, 1) == b"", "children are left"
        os.close(reading)


def test_a_child_run_by_hand_says_what_to_do() -> None:
    done = subprocess.run(
        [*fake_command("serve"), "/nowhere", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "zlm: the serve process is started by zlm itself: use `zlm serve`\n"


def test_spawning_what_cannot_start_raises(parent: Parent) -> None:
    parent.group._command = lambda role: ["/nonexistent/program"]
    with pytest.raises(FileNotFoundError):
        parent.group.spawn("serve", 0)
    assert parent.group.alive == []


def test_stop_is_not_needed_before_ready(parent: Parent) -> None:
    """A Stop sent while the child still starts is read once it has bound its inbox."""
    parent.group.spawn("serve", 0)
    parent.group.send("serve", 0, Stop())
    assert parent.death() == Death("serve", 0, 0)
