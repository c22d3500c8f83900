"""The heartbeat page, where there is room for it and where there is none."""

import errno
import os
from pathlib import Path

import pytest

from zlm.process import heartbeat
from zlm.process.heartbeat import Heartbeat, HeartbeatReader


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    heartbeat.create(tmp_path, 3)
    writer = Heartbeat(tmp_path, 1, "worker", 0)
    writer.beat(work_pending=True, steps=5)
    [seen] = HeartbeatReader(tmp_path).beats()
    assert (seen.role, seen.index, seen.pid) == ("worker", 0, os.getpid())
    assert seen.work_pending and seen.steps == 5


def test_a_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written to later, a page without room behind it would end the process by a signal."""

    def full(descriptor: int, offset: int, size: int) -> None:
        assert (offset, size) == (0, 3 * 128)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as caught:
        heartbeat.create(tmp_path, 3)
    assert caught.value.filename == str(tmp_path / "heartbeat")
