"""A real ``zlm serve`` as a test's own process, and what tests do with one.

Greedy requests to the model name ``smol``; answers parsed as strictly as the strictest client does.
"""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self

START_SECONDS = 120.0
MODEL = "smol"
MAX_MODEL_LEN = 1024


def eventually_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Look at *condition* until it holds or *seconds* have passed; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def strict_json(text: bytes | str) -> Any:
    """Parse JSON as strict clients do: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass
class Answer:
    """One HTTP answer. ``events`` are the parsed data events when it was a stream."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.body)

    @property
    def text(self) -> str:
        """The completion's text, or the chat's content."""
        choice = self.json["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def events(self) -> list[Any]:
        lines = self.body.decode("utf-8", "strict").split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [strict_json(each) for each in data if each != "[DONE]"]

    @property
    def streamed_text(self) -> str:
        choices = [choice for event in self.events for choice in event["choices"]]
        return "".join(
            c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices
        )


class Server:
    """One server process under test."""

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: list[str],
        port: int | None = None,
        program: list[str] | None = None,
    ) -> None:
        """Start ``zlm serve``, or a *program* that takes the same arguments."""
        self.port = port or free_port()
        self.log = log
        program = program or [str(Path(sys.executable).with_name("zlm")), "serve"]
        command = [*program, str(model)]
        common = ["--port", str(self.port), "--dtype", "float32"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *common, *flags], stdout=out, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> Self:
        def ready_or_dead() -> bool:
            return self.process.poll() is not None or self.health() == 200

        in_time = eventually_true(ready_or_dead, START_SECONDS)
        assert in_time and self.process.poll() is None, self.log.read_text()[-4000:]
        return self

    def health(self) -> int:
        """Return the status of /health; 0 when nobody answers."""
        try:
            return self.request("GET", "/health").status
        except OSError:
            return 0

    def request(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        if isinstance(body, dict):
            headers = {"Content-Type": "application/json", **(headers or {})}
            body = json.dumps(body).encode()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            answer_headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, answer_headers, response.read())
        finally:
            connection.close()

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """POST /v1/completions, greedy unless *fields* say otherwise."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
        return self.request("POST", "/v1/completions", body)

    def chat(self, content: str, **fields: Any) -> Answer:
        """POST /v1/chat/completions with one user message, greedy unless *fields* differ."""
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16, **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def together(self, requests: list[tuple[Any, dict[str, Any]]]) -> list[Answer]:
        """Send all (prompt, fields) at once; return their answers in order."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda each: self.complete(each[0], **each[1]), requests))

    def assert_good(self) -> None:
        """A good request answers 200: what must hold after every bad one."""
        answer = self.complete("The capital of France is", max_tokens=2)
        assert answer.status == 200, answer.body
        assert self.health() == 200

    def open_stream(self, prompt: Any, **fields: Any) -> socket.socket:
        """Send a streamed completion over a raw socket; return it unread."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "stream": True, **fields}
        data = json.dumps(body).encode()
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        raw.sendall(head.encode() + data)
        return raw

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name, summed over labels."""
        values: dict[str, float] = {}
        for line in self.request("GET", "/metrics").body.decode().splitlines():
            if line and not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
        return values

    def metric(self, name: str) -> float:
        """Return one family's value; counters may carry the suffix _total."""
        values = self.metrics()
        return values[name] if name in values else values[f"{name}_total"]

    def pids(self) -> dict[int, str]:
        """Return the living processes of the tree, by id, with their command lines."""
        parents, commands = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    command = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                parents[int(entry.name)] = int(stat[1])
                commands[int(entry.name)] = command
        found = [self.process.pid]
        for pid in found:  # grows while it is walked
            found += [child for child, parent in parents.items() if parent == pid]
        return {pid: commands[pid] for pid in found if pid in commands}

    def pid_of(self, role: str) -> int:
        return next(pid for pid, line in self.pids().items() if f"zlm.{role}.process" in line)

    def stop(self) -> None:
        """End whatever is left, without ceremony after a grace."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def alive(pids: dict[int, str]) -> list[str]:
    """Return the command lines of those of *pids* that still run (zombies do not)."""
    left = []
    for pid, command in pids.items():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            left.append(command)
    return left
