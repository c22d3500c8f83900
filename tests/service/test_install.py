"""bin/zlm-install: what it writes, that it can be run again, and what it refuses.

With DESTDIR only files are written; the rest of it is in ``test_systemd``.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALL = ROOT / "bin" / "zlm-install"
UNITS = {"zlm.service", "zlm@.service", "zlm.socket", "zlm@.socket", "zlm-gpu.service"}


def install(destination: Path | None, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DESTDIR": str(destination or "")}
    return subprocess.run(
        [str(INSTALL), *words], env=environment, capture_output=True, text=True, check=False
    )


def files(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time and text of every file under *folder*."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            facts = path.stat()
            at = str(path.relative_to(folder))
            found[at] = (facts.st_mode & 0o777, facts.st_mtime_ns, path.read_text())
    return found


def settings(folder: Path, name: str = "zlm") -> tuple[str, list[str]]:
    """Return model and flags of a service, read as systemd reads what has no backslash."""
    text = (folder / "etc/zlm" / f"{name}.env").read_text()
    values = dict(word.split("=", 1) for word in shlex.split(text, comments=True))
    return values["ZLM_MODEL"], shlex.split(values["ZLM_FLAGS"])


def test_installs_and_does_nothing_the_second_time(tmp_path: Path) -> None:
    flags = ["--host", "0.0.0.0", "--max-model-len", "2048", "--swap-space", "2"]
    first = install(tmp_path, "google/gemma-3-270m-it", *flags)
    assert first.returncode == 0, first.stderr
    assert "ufw allow from 192.168.1.0/24 to any port 8000 proto tcp" in first.stdout
    found = files(tmp_path)
    units = {Path(name).name for name in found if name.startswith("etc/systemd/system/")}
    assert units == UNITS
    assert found["etc/zlm/zlm.env"][0] == found["etc/zlm/secrets.env"][0] == 0o600
    assert found["etc/systemd/system/zlm.service"][0] == 0o644
    assert (tmp_path / "etc/zlm").stat().st_mode & 0o777 == 0o750
    assert settings(tmp_path) == ("google/gemma-3-270m-it", flags)

    again = install(tmp_path, "another/model", "--port", "9")
    assert again.returncode == 0, again.stderr
    assert "zlm.env exists and stays as it is" in again.stdout
    assert files(tmp_path) == found


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "zlm listens on 127.0.0.1 alone"),
        (["--host=::1", "--port", "80"], "zlm listens on ::1 alone"),
        (["--uds", "/run/x.sock"], ""),
        (["--config", "/etc/zlm/zlm.yaml"], "to let a network in: ufw allow"),
    ],
)
def test_what_is_told_of_the_firewall(tmp_path: Path, flags: list[str], told: str) -> None:
    said = install(tmp_path, "--allow-from", "10.0.0.0/8", "m", *flags).stdout
    assert told in said and ("ufw" in said) == ("ufw" in told)
    assert told or "listens" not in said


@pytest.mark.parametrize("flag", ["--api-key sk-mine", "--admin-api-key=sk-mine"])
def test_a_key_among_the_flags_is_warned_of(tmp_path: Path, flag: str) -> None:
    done = install(tmp_path, "m", *flag.split())
    assert done.returncode == 0 and "sk-mine" not in done.stdout + done.stderr
    assert "secrets.env" in done.stderr
    assert install(tmp_path, "--name", "b", "m", "--api-key-file", "/k").stderr == ""


def test_an_update_replaces_units_and_keeps_settings(tmp_path: Path) -> None:
    install(tmp_path)
    unit = tmp_path / "etc/systemd/system/zlm.service"
    secrets = tmp_path / "etc/zlm/secrets.env"
    unit.write_text("[Service]\nExecStart=/an/older/one\n")
    secrets.write_text("HF_TOKEN=hf_mine\n")
    install(tmp_path)
    assert unit.read_text() == (ROOT / "systemd/zlm.service").read_text()
    assert secrets.read_text() == "HF_TOKEN=hf_mine\n"
    model, _ = settings(tmp_path)
    assert model == "google/gemma-3-270m-it"


def test_a_second_model_on_a_port_of_its_own(tmp_path: Path) -> None:
    install(tmp_path, "google/gemma-3-270m-it")
    flags = ["--task", "embedding", "--host", "0.0.0.0", "--port", "8001"]
    done = install(tmp_path, "--name", "embed", "google/embeddinggemma-300m", *flags)
    assert "to any port 8001 proto tcp" in done.stdout
    assert settings(tmp_path, "embed") == ("google/embeddinggemma-300m", flags)
    assert settings(tmp_path) == ("google/gemma-3-270m-it", [])


@pytest.mark.parametrize(
    "word",
    ["a b", 'say "hi"', "$HOME", "a;b", "#5", "", "*", '{"a": [1, "b c"]}', "ünï", "`id`"],
)
def test_any_flag_arrives_as_it_was_given(tmp_path: Path, word: str) -> None:
    done = install(tmp_path, "/srv/my models/a", "--served-model-name", word, "--port", "8002")
    assert done.returncode == 0, done.stderr
    assert settings(tmp_path) == (
        "/srv/my models/a",
        ["--served-model-name", word, "--port", "8002"],
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nme", "x"], "no flag --nme"),
        (["--name", "a/b", "m"], "--name a/b: letters, digits"),
        (["--name", "secrets", "m"], "that name is taken"),
        (["--name", "other"], "which MODEL shall zlm@other serve?"),
        (["--models", "here", "m"], "--models here: an absolute path"),
        (["m", "--flag", "it's"], "there is a quote in it's"),
        (["m", "--flag", "a\nb"], "a line break"),
        (["m", "--port", "abc"], "--port abc: a number from 1 to 65535"),
        (["m", "--port=65536"], "--port 65536: a number from 1 to 65535"),
    ],
)
def test_refuses(tmp_path: Path, words: list[str], told: str) -> None:
    done = install(tmp_path, *words)
    assert done.returncode == 1
    assert told in done.stderr
    assert not (tmp_path / "etc/systemd").exists()


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], "127.0.0.1:8000"),
        (["--host", "0.0.0.0", "--port", "8001"], "0.0.0.0:8001"),
        (["--port=8001", "--host=localhost"], "127.0.0.1:8001"),
        (["--host", "::", "--port", "80"], "[::]:80"),
        (["--served-model-name", "a--port 9", "--uds", "/run/x.sock"], "/run/x.sock"),
    ],
)
def test_the_socket_listens_where_the_service_would(
    tmp_path: Path, flags: list[str], address: str
) -> None:
    done = install(tmp_path, "--socket", "--name", "it", "m", *flags)
    assert done.returncode == 0, done.stderr
    drop_in = tmp_path / "etc/systemd/system/zlm@it.socket.d/address.conf"
    assert drop_in.read_text() == f"[Socket]\nListenStream=\nListenStream={address}\n"
    assert settings(tmp_path, "it") == ("m", flags)


def test_the_socket_of_a_name_is_refused(tmp_path: Path) -> None:
    done = install(tmp_path, "--socket", "m", "--host", "server.lan")
    assert done.returncode == 1
    assert "--host server.lan: systemd takes addresses only" in done.stderr


def test_models_may_lie_elsewhere(tmp_path: Path) -> None:
    install(tmp_path, "--models", "/srv/models", "m")
    drop_in = tmp_path / "etc/systemd/system/zlm.service.d/models.conf"
    assert drop_in.read_text() == "[Service]\nReadWritePaths=/srv/models\n"


def test_uninstall_keeps_settings(tmp_path: Path) -> None:
    install(tmp_path, "--socket", "--models", "/srv/models", "m")
    own = tmp_path / "etc/systemd/system/zlm.service.d/own.conf"
    own.write_text("[Service]\n")
    assert install(tmp_path, "--uninstall").returncode == 0
    kept = {"etc/zlm/secrets.env", "etc/zlm/zlm.env", str(own.relative_to(tmp_path))}
    assert set(files(tmp_path)) == kept
    assert not (tmp_path / "etc/systemd/system/zlm.socket.d").exists()


def test_help_and_root(tmp_path: Path) -> None:
    assert "usage: zlm-install" in install(tmp_path, "--help").stdout
    if os.geteuid() != 0:
        assert "run it as root" in install(None, "m").stderr
