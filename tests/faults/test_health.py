"""/health from progress: what is stopped shows within --health-timeout. CASE 95 (hang)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import Server, eventually_true

HEALTH_SECONDS = 2.0
SLACK_SECONDS = 4.0  # two looks a second apart, on a machine that has other things to do


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--served-model-name", "smol", "--health-timeout", str(HEALTH_SECONDS)]
    with Server(model, tmp_path_factory.mktemp("health") / "log", flags) as running:
        yield running


@pytest.mark.parametrize("role", ["supervisor", "engine", "worker", "tokenizer"])
def test_case_95_a_stopped_process_turns_health_to_503_and_back(server: Server, role: str) -> None:
    pid = server.process.pid if role == "supervisor" else server.pid_of(role)
    os.kill(pid, signal.SIGSTOP)
    try:
        limit = HEALTH_SECONDS + SLACK_SECONDS
        assert eventually_true(lambda: server.health() == 503, limit)
        answer = server.request("GET", "/health/ready")
        assert answer.status == 503 and b"\n" not in answer.body
        assert f"{role} 0 has not run for" in answer.json["error"]["message"]
        assert server.request("GET", "/health/live").status == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually_true(lambda: server.health() == 200, limit)
    server.assert_good()
