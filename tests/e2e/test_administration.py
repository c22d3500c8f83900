"""Keys, quotas and administration of a real server with two front ends, over HTTPS."""

import contextlib
import json
import os
import shutil
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from running_server import Answer, Server, eventually_true
from tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")

LIMIT = 20
KEYS = (
    '{"key": "user-key", "name": "user"}\n'
    f'{{"key": "slow-key", "name": "slow", "requests_per_minute": {LIMIT}}}\n'
)
LONG = {"prompt": [5] * 8, "max_tokens": 8000, "ignore_eos": True}
PROMPT = {"prompt": list(range(10, 74)), "max_tokens": 1, "temperature": 0}


class SecureServer(Server):
    """A server that speaks TLS; ``ask`` shows a key."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        authority = Authority(folder)
        certificate, key = authority.issue(folder, "server")
        self.context = ssl.create_default_context(cafile=str(authority.file))
        tls = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
        model = tiny_checkpoint(folder / "model", "llama", max_position_embeddings=8192)
        super().__init__(model, folder / "log", flags + tls)

    def health(self) -> int:
        try:
            return self.ask("GET", "/health").status
        except OSError:
            return 0

    def ask(self, method: str, path: str, body: Any = None, key: str = "user-key") -> Answer:
        connection = HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.context)
        data = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": path.strip("/")}
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer

    def complete(self, body: dict[str, Any], key: str = "user-key") -> Answer:
        return self.ask("POST", "/v1/completions", body, key)

    def administer(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.ask(method, path, body, "boss-key")
        assert answer.status == 200, answer.body
        return answer.json


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("administered")
    (folder / "keys").write_text(KEYS)
    words = ["--api-key-file", str(folder / "keys"), "--admin-api-key", "boss-key"]
    words += ["--api-server-count", "2", "--tokenizer-pool-size", "1", "--block-size", "16"]
    words += ["--max-num-seqs", "2", "--max-waiting-queue-length", "1"]
    with SecureServer(folder, words) as running:
        yield running


def test_the_quota_of_a_key_is_exact_over_both_front_ends(server: SecureServer) -> None:
    """60 requests over connections of their own, some at once: exactly as many as the limit."""
    body = {"prompt": "x"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda _: server.ask("POST", "/tokenize", body, "slow-key"), range(60))
        )
    statuses = [answer.status for answer in answers]
    assert statuses.count(200) == LIMIT and statuses.count(429) == 60 - LIMIT
    assert server.ask("POST", "/tokenize", body).status == 200


def test_keys_are_nowhere_to_be_seen_case_92(server: SecureServer) -> None:
    info = server.ask("GET", "/server_info", key="boss-key")
    assert info.json["num_front_ends"] == 2 and info.json["config"]["server"]["ssl_certfile"]
    shown = info.body + server.log.read_bytes()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes()
        except OSError:
            continue
        if b"serve\0" in words and str(server.log.parent).encode() in words:
            assert b"--admin-api-key\0********\0" in words
            shown += words
    for key in (b"boss-key", b"user-key", b"slow-key"):
        assert key not in shown
    assert b"key=slow" in server.log.read_bytes()  # its name is what the log knows


def test_nothing_but_https_listens(server: SecureServer) -> None:
    """Of all processes of the tree, on IPv4, IPv6 and UDP."""
    sockets = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if table.startswith("udp") or words[3] == "0A":  # listening
                sockets[words[9]] = int(words[1].rpartition(":")[2], 16)
    found = set()
    for pid in tree(server.process.pid):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                inode = os.readlink(fd).removeprefix("socket:[").rstrip("]")
                found |= {sockets[inode]} if inode in sockets else set()
    assert found == {server.port}


def tree(root: int) -> list[int]:
    """Return the processes that descend from *root*, and itself."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    assert len(found) == 6  # supervisor, two front ends, tokenizer, engine core, worker
    return found


def test_the_prefix_cache_is_reset(server: SecureServer) -> None:
    def cached() -> int:
        usage = server.complete(PROMPT).json["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() >= 48
    assert server.administer("POST", "/reset_prefix_cache")["count"] >= 3
    assert cached() == 0


def test_requests_are_aborted_and_more_than_may_wait_are_refused(server: SecureServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.complete, LONG) for _ in range(3)]

        def load() -> Any:
            return server.administer("GET", "/load")

        assert eventually_true(lambda: load()["num_running"] + load()["num_waiting"] == 3, 20)
        refused = server.complete(LONG)
        assert refused.status == 503 and refused.json["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        body = {"request_ids": ["v1/completions"]}
        assert server.administer("POST", "/abort_requests", body) == {"count": 3}
        for answer in [future.result(30) for future in running]:
            assert answer.status == 503 and answer.headers["x-should-retry"] == "false"
            assert answer.json["error"]["code"] == "request_aborted"
    assert eventually_true(lambda: load()["num_running"] == 0, 10)


def test_a_server_sleeps_and_wakes_up(server: SecureServer) -> None:
    """Asleep it holds no model; what was open has one answer; awake it answers as before."""
    before = server.complete({**PROMPT, "max_tokens": 8}).text
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(server.complete(LONG)))
    thread.start()
    assert eventually_true(lambda: server.administer("GET", "/load")["num_running"] == 1, 20)
    assert server.administer("GET", "/is_sleeping") == {"is_sleeping": False}
    server.administer("POST", "/sleep")
    thread.join(30)
    assert [answer.status for answer in answers] == [503]
    asleep = server.complete(PROMPT)
    assert asleep.status == 503 and "sleeps" in asleep.json["error"]["message"]
    assert int(asleep.headers["retry-after"]) >= 1
    assert eventually_true(
        lambda: server.administer("GET", "/is_sleeping") == {"is_sleeping": True}, 10
    )
    assert server.ask("POST", "/sleep", key="boss-key").status == 503
    assert server.health() == 503 and server.ask("GET", "/health/live").status == 200
    server.administer("POST", "/wake_up")
    assert eventually_true(lambda: server.health() == 200, 60)
    assert server.complete({**PROMPT, "max_tokens": 8}).text == before
    assert server.administer("GET", "/is_sleeping") == {"is_sleeping": False}
    server.administer("POST", "/wake_up")  # awake already: nothing happens
    assert server.complete(PROMPT).status == 200
