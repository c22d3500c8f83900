"""The runtime directory: where it is made, who may enter, and what is cleaned up."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zlm.errors import ConfigError
from zlm.ipc.sockets import address
from zlm.process.runtime import (
    LONGEST_NAME,
    LONGEST_SOCKET_NAME,
    MAX_SOCKET_PATH_BYTES,
    RuntimeDirectory,
    candidates,
    remove_stale,
    temporary,
)


def test_private_and_removed_at_the_end(tmp_path: Path) -> None:
    with RuntimeDirectory({"XDG_RUNTIME_DIR": str(tmp_path)}) as directory:
        assert directory.path.parent == tmp_path
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        (directory.path / "engine-0.sock").touch()
    assert list(tmp_path.iterdir()) == []
    directory.close()


def test_systemd_comes_first_and_of_several_the_first(tmp_path: Path) -> None:
    environment = {"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": str(tmp_path)}
    temporary = Path(tempfile.gettempdir())
    assert list(candidates(environment))[:3] == [Path("/run/a"), tmp_path, temporary]


def test_a_place_that_cannot_be_used_is_passed_over(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 90)
    too_long.mkdir()
    environment = {"RUNTIME_DIRECTORY": str(tmp_path / "missing"), "XDG_RUNTIME_DIR": str(too_long)}
    with RuntimeDirectory(environment) as directory:
        assert directory.path.parent == Path(tempfile.gettempdir())
        longest = address(directory.path, "tokenizer", 99999).removeprefix("ipc://")
        assert len(os.fsencode(longest)) <= MAX_SOCKET_PATH_BYTES


def test_the_longest_place_that_is_taken_leaves_room_for_sockets(tmp_path: Path) -> None:
    room = MAX_SOCKET_PATH_BYTES - LONGEST_SOCKET_NAME - LONGEST_NAME - 1
    place = tmp_path / ("x" * (room - len(str(tmp_path)) - 1))
    place.mkdir()
    with RuntimeDirectory({"XDG_RUNTIME_DIR": str(place)}) as directory:
        assert directory.path.parent == place
        longest = address(directory.path, "tokenizer", 99999).removeprefix("ipc://")
        assert len(os.fsencode(longest)) == MAX_SOCKET_PATH_BYTES


def test_no_place_at_all_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlm.process.runtime.candidates", lambda _: [Path("/nonexistent")])
    with pytest.raises(ConfigError, match=r"/nonexistent: No such file or directory"):
        RuntimeDirectory({})


def left_by_a_killed(expression: str, **environment: str) -> Path:
    """Return the directory that *expression* made in a process that was killed then."""
    code = (
        "import os\n"
        "from zlm.process.runtime import RuntimeDirectory, temporary\n"
        f"print({expression}, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return Path(killed.stdout.strip())


def test_a_temporary_directory_of_the_dead_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = left_by_a_killed("(held := temporary('zlm-bench-')).__enter__()", TMPDIR=str(tmp_path))
    assert stale.parent == tmp_path and stale.is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary("zlm-bench-") as first, temporary("zlm-bench-") as second:
        assert not stale.exists() and first.is_dir() and second.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_directories_of_the_dead_are_removed_and_of_the_living_kept(tmp_path: Path) -> None:
    stale = left_by_a_killed("RuntimeDirectory().path", RUNTIME_DIRECTORY=str(tmp_path))
    assert stale.parent == tmp_path and stale.is_dir()
    link = tmp_path / "zlm-linklink"
    link.symlink_to(tmp_path)
    with RuntimeDirectory({"RUNTIME_DIRECTORY": str(tmp_path)}) as living:
        assert not stale.exists()
        assert remove_stale(tmp_path) == []
        assert living.path.is_dir() and link.is_symlink()
