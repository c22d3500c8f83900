"""The commands when things go wrong: no data is lost, one line says why, nothing stays behind."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from running_server import eventually_true

from zlm.cli import ask, chat, complete, own_server, run, run_client
from zlm.cli.chat import Chat
from zlm.cli.main import main
from zlm.errors import ZlmError

LINE = json.dumps({"id": "a", "prompt": "x"}) + "\n"


class NoLLM(BaseHTTPRequestHandler):
    """A web server that knows nothing of models; 401 below /keyed."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.send_error(401 if self.path.startswith("/keyed") else 501)

    def log_message(self, *_: object) -> None:
        pass


class Breaking(BaseHTTPRequestHandler):
    """A server that dies in the middle of an answer."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        event = {"choices": [{"delta": {"content": "half an"}, "finish_reason": None}]}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=[NoLLM])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of what takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("more", [[], ["--anew"]])
@pytest.mark.parametrize("make", [None, os.symlink, os.link])
def test_an_input_is_never_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], make: object
) -> None:
    given, output = tmp_path / "in", tmp_path / "out"
    given.write_text(LINE)
    if callable(make):
        make(given, output)
    else:
        output = tmp_path / "." / "in"
    words = ["--url", "http://127.0.0.1:9", str(given), "-o", str(output), *more]
    assert run.main(words) == 2
    assert "is the input" in capsys.readouterr().err
    assert given.read_text() == LINE


@pytest.mark.parametrize("text", ["precious", '{"prompt": "a"}', '{"id":"a","prompt":"b"}'])
def test_what_is_no_answer_is_not_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A last line without an end is an unfinished answer only if it begins like one."""
    given, output = tmp_path / "in", tmp_path / "out"
    given.write_text(LINE)
    output.write_text(text)
    assert run.main(["--url", "http://127.0.0.1:9", str(given), "-o", str(output)]) == 2
    assert "see line 1" in capsys.readouterr().err
    assert output.read_text() == text


@pytest.mark.parametrize("output", ["/dev/null", "/dev/full", "-"])
def test_an_output_that_keeps_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    given = tmp_path / "in"
    given.write_text(LINE)
    assert run.main(["--url", "http://127.0.0.1:9", str(given), "-o", output]) == 2
    assert "file" in capsys.readouterr().err


def test_requests_are_not_taken_for_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, output = tmp_path / "in", tmp_path / "out"
    given.write_text(LINE)
    output.write_text(LINE)
    assert run.main(["--url", "http://127.0.0.1:9", str(given), "-o", str(output)]) == 2
    assert "holds requests: see line 1" in capsys.readouterr().err
    assert output.read_text() == LINE


def test_a_server_that_never_answers(
    tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_client, "CONNECT_SECONDS", 0.2)
    with pytest.raises(ZlmError, match="has not answered in time"):
        ask.by_url(silent, "", 0.2).models()
    (tmp_path / "in").write_text(LINE)
    assert run.main(["--url", silent, str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
    assert "has not answered for 0.2 s" in capsys.readouterr().err
    assert ask.by_url(silent, "")._connect().timeout == 10, "what the commands have"


@pytest.mark.parametrize("command", ["run", "chat", "complete"])
def test_a_server_of_another_kind(
    tmp_path: Path, url: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(LINE)
    if command == "run":
        words = ["--url", url, str(tmp_path / "in"), "-o", str(tmp_path / "out")]
        assert run.main(words) == 1
    else:
        module = {"chat": chat, "complete": complete}[command]
        prompt = ["--prompt", "x"] if command == "complete" else []
        assert module.main(["--url", url, *prompt]) == 1  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert "does not look like an OpenAI-compatible server" in said
    assert "<!DOCTYPE" not in said and "Traceback" not in said


def test_keys(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(LINE)
    words = [str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert run.main(["--url", f"{url}/keyed", *words]) == 1
    assert "--api-key" in capsys.readouterr().err
    for module, more in ((run, words), (complete, ["--prompt", "x"])):
        assert module.main(["--url", url, "--api-key", "schlüssel✓", *more]) == 2
        assert "--api-key: a key has only" in capsys.readouterr().err


def test_a_host_that_is_unknown_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (tmp_path / "in").write_text(LINE)
    words = ["--url", "http://absent.invalid", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert run.main(words) == 1
    assert "absent.invalid:80 cannot be reached" in capsys.readouterr().err


def test_no_server_is_waited_for_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_client, "AWAY_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (tmp_path / "in").write_text(LINE)
    words = [f"--url=http://127.0.0.1:{port}", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert run.main(words) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(f"waiting for 127.0.0.1:{port}, up to 0.1 s")
    assert "no server has answered" in second


def test_a_run_of_failures_tells_the_first(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("no JSON\nnor this\n")
    words = ["--url", url, str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert run.main(words) == 3
    assert "the first error: line 1 is no JSON" in capsys.readouterr().err
    assert run.main(words) == 3, "told again by a run that has nothing to do"
    assert "the first error: line 1 is no JSON" in capsys.readouterr().err
    (tmp_path / "in").write_text("")
    assert run.main([*words[:3], "-o", str(tmp_path / "none")]) == 0
    assert "holds no requests" in capsys.readouterr().err


@pytest.mark.parametrize("command", [complete, chat])
def test_a_server_that_is_not_there_is_named(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert command.main(["--url", f"http://me:secret@127.0.0.1:{port}/a/v1"]) == 1
    said = capsys.readouterr().err
    assert f"the server at http://127.0.0.1:{port}/a cannot be reached" in said
    assert "secret" not in said


@pytest.mark.parametrize("url", [Breaking], indirect=True)
def test_half_an_answer_is_kept(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Chat(ask.by_url(url, ""), {"model": "m"}, "")
    talk._respond("why?")
    assert "broke the answer off" in capsys.readouterr().err
    assert [each["content"] for each in talk.messages] == ["why?", "half an"]
    talk._respond("/save")
    assert "/save FILE" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_stays_behind_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Nor what an owner left that was killed: the next one takes it away."""
    program = (
        "import sys, time\n"
        "from zlm.cli.own_server import OwnServer\n"
        "with OwnServer('absent', []):\n"
        "    print('there', flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    def owner() -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", program]
        started = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
        assert started.stdout is not None and started.stdout.readline() == b"there\n"
        return started

    def folders() -> list[Path]:
        return list(tmp_path.glob("*zlm-own-*"))

    killed = owner()
    killed.kill()
    killed.communicate()
    left = folders()
    assert len(left) == 1
    ended = owner()
    assert eventually_true(lambda: left[0] not in folders() and len(folders()) == 1, 5)
    ended.send_signal(number)
    ended.communicate(timeout=30)
    assert ended.returncode == 128 + number and folders() == []


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_model_that_is_not_there_is_one_line(
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(own_server, "END_SIGNALS", ())  # this process's own stay
    module = {"chat": chat, "complete": complete}[command]
    prompt = ["--prompt", "x"] if command == "complete" else []
    assert module.main(["nope.gguf", *prompt]) == 1  # type: ignore[attr-defined]
    assert capsys.readouterr().err == f"zlm {command}: there is no file or folder nope.gguf\n"


def test_broken_yaml_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: [1\nb: {")
    assert main(["serve", "m", "--config", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith(f"zlm serve: --config {path}: line 2, column ") and "\\n" not in said


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "zlm.cli.main", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "zlm: cannot write: No space left on device\n")


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zlm.cli.main.importlib.import_module", interrupted)
    assert main(["serve", "m"]) == 130
