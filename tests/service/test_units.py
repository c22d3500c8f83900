"""The units as files: what systemd thinks of them, and that they say what they must.

What they do when systemd runs them is in ``test_systemd``.
"""

import configparser
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zlm.cli.parse import parse
from zlm.config import ServerOptions
from zlm.supervisor.drain import ABORT_SECONDS, STOP_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent
UNITS = ROOT / "systemd"
MOST_EXPOSURE = 30  # tenths; systemd-analyze calls up to 4.9 OK or better
GOAL = {
    "zlm.env": ["--port 8000"],
    "gemma-3-270m-it.env": ["--host 0.0.0.0", "--max-num-seqs 1", "--download-dir /opt/models"],
    "embeddinggemma.env": ["--task embedding", "--port 8001"],
}

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def read(name: str) -> dict[str, dict[str, list[str]]]:
    """Return a unit's settings: section, name, values in order."""
    unit: dict[str, dict[str, list[str]]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            section = unit.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, value = line.split("=", 1)
            section.setdefault(key, []).append(value)
    return unit


def seconds(value: str) -> float:
    units = {"min": 60.0, "s": 1.0}
    for suffix, factor in units.items():
        if value.endswith(suffix):
            return float(value.removesuffix(suffix)) * factor
    return float(value)


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """Copies of the units whose program exists on this machine."""
    copies = []
    for unit in sorted(UNITS.glob("zlm*")):
        text = unit.read_text().replace("/opt/zlm/venv/bin/zlm", sys.executable)
        text = text.replace("file:/opt/zlm/README.md", f"file:{ROOT}/README.md")
        copies.append(tmp_path / unit.name)
        copies[-1].write_text(text)
    assert len(copies) == 5
    return copies


@needs_analyze
def test_systemd_finds_no_fault(installed: list[Path]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, installed)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{installed[0].parent}:"},
    )
    own = [line for line in done.stderr.splitlines() if "zlm" in line]
    assert (done.returncode, own) == (0, []), done.stderr


@needs_analyze
@pytest.mark.parametrize("name", ["zlm.service", "zlm@.service"])
def test_hardening_is_rated(name: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={MOST_EXPOSURE}"]
    done = subprocess.run([*command, str(UNITS / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_both_services_are_the_same_but_for_their_names() -> None:
    """A change of one is a change of the other."""
    single, several = read("zlm.service"), read("zlm@.service")
    assert several["Service"].pop("EnvironmentFile")[1] == "/etc/zlm/%i.env"
    assert single["Service"].pop("EnvironmentFile")[1] == "/etc/zlm/zlm.env"
    assert several["Service"].pop("RuntimeDirectory") == ["zlm-%i"]
    assert single["Service"].pop("RuntimeDirectory") == ["zlm"]
    assert several["Unit"].pop("Description") != single["Unit"].pop("Description")
    assert single == several


def test_what_cuda_needs_is_left_open() -> None:
    """Settings that rate well and break CUDA, torch's generated code or Triton."""
    service = read("zlm.service")["Service"]
    for name in ("MemoryDenyWriteExecute", "PrivateDevices", "ProcSubset", "PrivateUsers"):
        assert name not in service
    assert service["DeviceAllow"] == ["char-nvidia* rw"]
    assert service["LimitMEMLOCK"] == ["infinity"]
    assert not any("resources" in value for value in service["SystemCallFilter"])  # mbind


def test_a_stop_waits_for_open_requests() -> None:
    service = read("zlm.service")["Service"]
    drained = ServerOptions().shutdown_timeout_seconds + ABORT_SECONDS + STOP_SECONDS
    assert seconds(service["TimeoutStopSec"][0]) > drained
    assert service["KillMode"] == ["mixed"]
    assert service["Type"] == ["notify"] and service["NotifyAccess"] == ["main"]


@pytest.mark.parametrize("name", sorted(GOAL))
def test_example_settings_are_flags_of_serve(name: str) -> None:
    text = (UNITS / "examples" / name).read_text().replace("\\\n", "")
    words = shlex.split(text, comments=True)
    settings = dict(word.split("=", 1) for word in words)
    assert set(settings) == {"ZLM_MODEL", "ZLM_FLAGS"}
    flags = shlex.split(settings["ZLM_FLAGS"])
    config, _ = parse([settings["ZLM_MODEL"], *flags])
    assert config.model.model == settings["ZLM_MODEL"]
    for goal in GOAL[name]:
        assert goal in " ".join(flags)


def test_sockets_listen_where_the_services_would() -> None:
    assert read("zlm.socket")["Socket"]["ListenStream"] == ["127.0.0.1:8000"]
    at = f"{ServerOptions().host}:{ServerOptions().port}"
    assert read("zlm.socket")["Socket"]["ListenStream"] == [at]
    assert "Accept" not in read("zlm@.socket")["Socket"]  # each connection a process: never


def test_units_are_plain_files() -> None:
    for unit in UNITS.glob("zlm*"):
        assert unit.stat().st_mode & (stat.S_IXUSR | stat.S_IXOTH) == 0
        parser = configparser.ConfigParser(strict=False, allow_no_value=True, interpolation=None)
        parser.read(unit)
        assert "Unit" in parser
