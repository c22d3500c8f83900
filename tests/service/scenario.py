"""What the units do under a real systemd: run as root inside a machine that ``test_systemd`` boots.

Each check prints ``ok NAME`` when it holds; the first that does not ends the run with its reason.
Standard library only. Arguments: the path of a model of text, that of one of embeddings, and the
checks to run; without any, all.
"""

import contextlib
import http.client
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEXT_MODEL, EMBEDDING_MODEL, *ONLY = sys.argv[1:]
INSTALL = "/srv/zlm/bin/zlm-install"
START_SECONDS = 90.0
STREAM_TOKENS = 240 if "tiny" in TEXT_MODEL else 60  # for a second or so
FLAGS = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--cpu-threads", "2"]
FLAGS += ["--served-model-name", "it", "--host", "0.0.0.0"]


def sh(*words: str, ok: bool = True) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 or not ok, f"{words}: {done.returncode}: {done.stdout}"
    return done.stdout


def show(unit: str, *names: str) -> dict[str, str]:
    lines = sh("systemctl", "show", unit, *(f"--property={name}" for name in names)).splitlines()
    return dict(line.split("=", 1) for line in lines)


def main_pid(unit: str = "zlm") -> int:
    return int(show(unit, "MainPID")["MainPID"])


def eventually(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{journal()}"
        time.sleep(0.05)


def journal() -> str:
    return sh("journalctl", "--no-pager", "-o", "cat", "-n", "60", "-u", "zlm*")


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Send one request over a connection of its own; return status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data else None


def complete() -> int:
    body = {"model": "it", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    return ask(8000, "/v1/completions", body)[0]


@contextlib.contextmanager
def clients_that_go_on() -> Iterator[list[int]]:
    """Have a client send request after request; yield the list that its answers' statuses go to."""
    statuses: list[int] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                statuses.append(complete())
            except OSError as error:
                statuses.append(-(error.errno or 1))
            except http.client.HTTPException:
                statuses.append(-1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join()


def own_processes() -> list[str]:
    """Return the command lines of the processes of the user zlm."""
    uid = pwd.getpwnam("zlm").pw_uid
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if entry.stat().st_uid == uid:
                found.append((entry / "cmdline").read_bytes().decode().replace("\0", " "))
    return found


def check_install() -> None:
    """zlm-install makes user, settings and units, and returns once the service serves."""
    said = sh(INSTALL, "--no-packages", "--socket", TEXT_MODEL, *FLAGS)
    assert "to let a network in: ufw allow from 192.168.1.0/24 to any port 8000 proto tcp" in said
    found = show("zlm", "ActiveState", "StatusText", "NRestarts", "User")
    assert found == {
        "ActiveState": "active",
        "StatusText": f"serving {TEXT_MODEL} on http://0.0.0.0:8000",
        "NRestarts": "0",
        "User": "zlm",
    }, found
    assert ask(8000, "/health") == (200, None)
    assert complete() == 200
    assert show("zlm.service", "UnitFileState")["UnitFileState"] == "enabled"
    assert show("zlm.socket", "UnitFileState")["UnitFileState"] == "enabled"
    assert all("zlm" in line for line in own_processes()) and len(own_processes()) >= 5


def check_install_again() -> None:
    """A second run changes nothing and restarts nothing."""
    settings = Path("/etc/zlm/zlm.env")
    before = main_pid(), settings.read_text(), settings.stat().st_mtime_ns
    ufw = Path("/usr/sbin/ufw")  # a firewall that only notes what it is told
    ufw.write_text('#!/bin/sh\necho "$*" >>/run/ufw\n')
    ufw.chmod(0o755)
    network = ["--allow-from", "10.1.0.0/16"]
    said = sh(INSTALL, "--no-packages", "--socket", *network, TEXT_MODEL, "--port", "9")
    assert Path("/run/ufw").read_text() == "allow from 10.1.0.0/16 to any port 8000 proto tcp\n"
    assert "/etc/zlm/zlm.env exists and stays as it is" in said
    assert (main_pid(), settings.read_text(), settings.stat().st_mtime_ns) == before
    assert settings.stat().st_mode & 0o777 == 0o600
    assert Path("/etc/zlm/secrets.env").stat().st_mode & 0o777 == 0o600


def check_sandbox() -> None:
    """The service sees no homes, no other devices, and can write to its own directories alone."""
    pid = main_pid()
    enter = ["nsenter", "-t", str(pid), "-m", "setpriv", "--reuid=zlm", "--regid=zlm"]
    enter += ["--clear-groups", "sh", "-c"]
    assert "Permission denied" in sh(*enter, "ls /root", ok=False)
    for path in ("/opt/zlm", "/etc", "/usr", "/root"):
        said = sh(*enter, f"touch {path}/x", ok=False)
        assert "Permission denied" in said or "Read-only file system" in said, (path, said)
    for path in ("/var/lib/zlm", "/var/cache/zlm", "/run/zlm", "/opt/models", "/tmp"):
        assert sh(*enter, f"touch {path}/x && rm {path}/x") == "", path
    limits = Path(f"/proc/{pid}/status").read_text()
    assert "CapEff:\t0000000000000000" in limits and "NoNewPrivs:\t1" in limits


def check_stop() -> None:
    """A stop lets a running stream end (CASES 96); whoever connects then starts the service."""
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=START_SECONDS)
    body = {"model": "it", "prompt": "One, two,", "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
    with contextlib.closing(connection):
        response = connection.getresponse()
        first = response.readline()
        stop = subprocess.Popen(["systemctl", "stop", "zlm.service"])
        rest = response.read()
    assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n"), rest[-500:]
    assert stop.wait(30) == 0
    said = journal()
    assert said.index("draining: open requests") < said.index(f"output={STREAM_TOKENS} "), said
    found = show("zlm", "ActiveState", "Result")
    assert found == {"ActiveState": "inactive", "Result": "success"}, found
    assert own_processes() == []
    assert complete() == 200


def check_restart() -> None:
    """Clients wait through a restart: no request fails and none is refused."""
    pid = main_pid()
    with clients_that_go_on() as statuses:
        eventually(lambda: len(statuses) > 2, "requests before the restart")
        sh("systemctl", "restart", "zlm")
        assert main_pid() != pid
        count = len(statuses)
        eventually(lambda: len(statuses) > count + 2, "requests after the restart")
    assert set(statuses) == {200}, statuses


def check_kill() -> None:
    """kill -9 of the main process (CASES 95, 97): it is started anew, later clients wait."""
    pid = main_pid()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: main_pid() not in (0, pid), "a new main process")
    assert complete() == 200
    eventually(lambda: show("zlm", "ActiveState")["ActiveState"] == "active", "active again")
    assert show("zlm", "NRestarts")["NRestarts"] == "1"
    assert len(own_processes()) <= 6, own_processes()


def check_watchdog() -> None:
    """A supervisor that stands still is killed by systemd's watchdog and replaced."""
    folder = Path("/run/systemd/system/zlm.service.d")
    folder.mkdir(parents=True)
    (folder / "watchdog.conf").write_text("[Service]\nWatchdogSec=4\n")
    sh("systemctl", "daemon-reload")
    sh("systemctl", "restart", "zlm")
    pid = main_pid()
    told = show("zlm", "WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"]
    eventually(
        lambda: show("zlm", "WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"] != told,
        "the watchdog is fed",
    )
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: main_pid() not in (0, pid), "a new main process", 30.0)
    assert "Watchdog timeout" in journal()
    assert complete() == 200


def check_sockets() -> None:
    """Two sockets on one port for two front ends, and a Unix socket that both share."""
    settings = Path("/etc/zlm/zlm.env")
    before = settings.read_text()
    settings.write_text(before.replace("--device cpu", "--device cpu --api-server-count 2"))
    folder = Path("/run/systemd/system/zlm.socket.d")
    folder.mkdir(parents=True)
    port = "ListenStream=127.0.0.1:8000\n"  # the name comes after that of zlm-install's drop-in
    (folder / "more.conf").write_text(
        f"[Socket]\nListenStream=\n{port}{port}ListenStream=/run/zlm.sock\nReusePort=yes\n"
    )
    sh("systemctl", "daemon-reload")
    sh("systemctl", "stop", "zlm.service", "zlm.socket")
    sh("systemctl", "start", "zlm.socket")
    sh("systemctl", "start", "zlm.service")
    where = "http://127.0.0.1:8000 and unix:/run/zlm.sock"
    assert show("zlm", "StatusText")["StatusText"].endswith(f" on {where}")
    assert Path("/proc/net/tcp").read_text().count(": 0100007F:1F40 00000000") == 2
    assert {complete() for _ in range(20)} == {200}
    client = socket.socket(socket.AF_UNIX)
    client.connect("/run/zlm.sock")
    client.sendall(b"GET /health HTTP/1.1\r\nHost: z\r\nConnection: close\r\n\r\n")
    assert client.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    client.close()
    settings.write_text(before)


def check_instance() -> None:
    """A second model, as zlm@NAME on a port of its own."""
    flags = ["--task", "embedding", "--port", "8001", "--device", "cpu"]
    said = sh(INSTALL, "--no-packages", "--socket", "--name", "embed", EMBEDDING_MODEL, *flags)
    assert "to any port 8001 proto tcp" in said
    body = {"model": EMBEDDING_MODEL, "input": "a text"}
    status, answer = ask(8001, "/v1/embeddings", body)
    assert status == 200 and len(answer["data"][0]["embedding"]) > 100
    assert complete() == 200
    assert show("zlm@embed", "StatusText")["StatusText"].endswith("on http://127.0.0.1:8001")


def check_settings() -> None:
    """Flags arrive at the program as they were given to zlm-install."""
    words = ["a b", 'say "hi"', "C:\\x \\\\y\\", "C:\\x", "$HOME", "#5", "", "ü", "`id`", "%i"]
    words.append('{"a": [1, "\\u00fc"]}')
    model = "/srv/my models/${x}\\a"
    sh(INSTALL, "--no-packages", "--no-start", "--name", "odd", model, *words)
    folder = Path("/run/systemd/system/zlm@odd.service.d")
    folder.mkdir(parents=True)
    command = "/opt/zlm/venv/bin/python -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    (folder / "echo.conf").write_text(
        "[Service]\nType=oneshot\nRestart=no\nStandardOutput=file:/var/lib/zlm/said\n"
        f"ExecStart=\nExecStart={command} ${{ZLM_MODEL}} $ZLM_FLAGS\n"
    )
    sh("systemctl", "daemon-reload")
    sh("systemctl", "start", "zlm@odd")
    said = json.loads(Path("/var/lib/zlm/said").read_text())
    assert said == [model, *words], (said, Path("/etc/zlm/odd.env").read_text())


def check_uninstall() -> None:
    """Nothing that runs and no unit is left; settings are."""
    sh(INSTALL, "--uninstall")
    assert own_processes() == []
    assert not list(Path("/etc/systemd/system").glob("zlm*"))
    assert not Path("/run/zlm").exists() and not Path("/run/zlm-embed").exists()
    assert Path("/etc/zlm/zlm.env").exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8000)) != 0


def main() -> None:
    for check in (
        check_install,
        check_install_again,
        check_settings,
        check_sandbox,
        check_stop,
        check_restart,
        check_kill,
        check_watchdog,
        check_sockets,
        check_instance,
        check_uninstall,
    ):
        name = check.__name__.removeprefix("check_")
        if ONLY and name not in ONLY:
            continue
        started = time.monotonic()
        try:
            check()
        except AssertionError:
            print(journal())
            raise
        print(f"ok {name} {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
