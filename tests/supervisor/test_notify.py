"""systemd's notification protocol, against sockets of the test's own."""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from zlm.supervisor.notify import Notifier

MORE_TIME = "EXTEND_TIMEOUT_USEC=120000000"


class Manager:
    """The service manager's end of the protocol."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self._socket.setblocking(False)

    def told(self) -> list[list[str]]:
        """Return the assignments of each message since the last call."""
        messages = []
        try:
            while True:
                messages.append(self._socket.recv(4096).decode().split("\n"))
        except BlockingIOError:
            return messages

    def close(self) -> None:
        self._socket.close()
        if not self.name.startswith("@"):
            Path(self.name).unlink()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.close()


def test_messages(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    notifier.status("loading a model\nREADY=1")
    notifier.ready("serving")
    notifier.status("restarting the engine")
    notifier.stopping("asked to", 40.0)
    notifier.status("draining")
    assert manager.told() == [
        ["STATUS=loading a model READY=1", MORE_TIME],
        ["READY=1", f"MAINPID={os.getpid()}", "STATUS=serving"],
        ["STATUS=restarting the engine"],
        ["STOPPING=1", "STATUS=asked to", "EXTEND_TIMEOUT_USEC=40000000"],
        ["STATUS=draining"],
    ]
    notifier.close()
    notifier.close()
    notifier.status("dropped")
    assert manager.told() == []


def test_abstract_socket(tmp_path: Path) -> None:
    manager = Manager(f"@zlm-test-{tmp_path.name}")
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    notifier.stopping("asked to")
    assert manager.told() == [["STOPPING=1", "STATUS=asked to"]]
    notifier.close()
    manager.close()


def test_progress_gives_a_start_more_time_and_then_feeds_the_watchdog(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "30000000"}
    notifier = Notifier({**environment, "WATCHDOG_PID": str(os.getpid())})
    assert notifier.watchdog_seconds == 30.0
    notifier.watchdog()
    notifier.ready("serving")
    notifier.watchdog()
    assert [message[0] for message in manager.told()] == [MORE_TIME, "READY=1", "WATCHDOG=1"]
    notifier.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"},
    ],
    ids=str,
)
def test_no_watchdog(manager: Manager, environment: dict[str, str]) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name, **environment})
    assert notifier.watchdog_seconds is None
    notifier.ready("serving")
    notifier.watchdog()
    assert len(manager.told()) == 1
    notifier.close()


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "30000000"})
    notifier.ready("serving")
    notifier.watchdog()
    notifier.close()


def test_a_manager_that_comes_back_learns_what_it_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    with caplog.at_level(logging.WARNING):
        notifier.status("loading")
        notifier.ready("serving")
    assert [record.message for record in caplog.records] == [
        "cannot notify the service manager: [Errno 2] No such file or directory"
    ]
    manager = Manager(str(tmp_path / "notify"))
    notifier.status("serving still")
    assert [sorted(message) for message in manager.told()] == [
        [f"MAINPID={os.getpid()}", "READY=1", "STATUS=serving still"]
    ]
    notifier.status("nothing left over")
    assert manager.told() == [["STATUS=nothing left over"]]
    notifier.close()
    manager.close()


def test_a_manager_that_does_not_read_holds_nobody_up(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    for number in range(2000):  # far more than the socket holds
        notifier.status(str(number))
    notifier.ready("serving")
    assert 0 < len(manager.told()) < 2000
    notifier.status("at last")
    assert "READY=1" in manager.told()[0]
    notifier.close()
