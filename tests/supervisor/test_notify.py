"""systemd's notification protocol, against sockets of the test's own."""

import logging
import socket
from pathlib import Path

import pytest

from zlm.supervisor.notify import Notifier


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_messages(tmp_path: Path, kind: str) -> None:
    name = f"@zlm-test-{tmp_path.name}" if kind == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if kind == "abstract" else name)
        notifier = Notifier({"NOTIFY_SOCKET": name})
        notifier.status("loading a model\nwith a line break")
        notifier.ready("serving")
        notifier.stopping("asked to")
        told = [manager.recv(4096) for _ in range(3)]
        assert told == [
            b"STATUS=loading a model with a line break",
            b"READY=1\nSTATUS=serving",
            b"STOPPING=1\nSTATUS=asked to",
        ]
        notifier.close()
        notifier.close()


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier({})
    notifier.ready("serving")
    notifier.close()


def test_a_manager_that_is_gone_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    with caplog.at_level(logging.WARNING):
        notifier.status("one")
        notifier.status("two")
    assert [record.message for record in caplog.records] == [
        "cannot notify the service manager: [Errno 2] No such file or directory"
    ]
