"""Faults inside a step: a kernel that raises, no memory, an endless loop, a wrong result.

The request that did it ends with an error like all others that were open, and the engine is back.
"""

import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest
from fault_load import OpenWhole, start_load
from running_server import Server, eventually_true

EXCEPTION, NO_MEMORY, ENDLESS, WRONG_RESULT = range(300, 304)
FLAGS = ["--served-model-name", "smol", "--max-model-len", "512", "--hang-timeout", "3"]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = [sys.executable, str(Path(__file__).with_name("faulty_server.py"))]
    log = tmp_path_factory.mktemp("poison") / "log"
    with Server(model, log, FLAGS, program=program) as running:
        yield running


def works(server: Server) -> bool:
    try:
        return server.complete([1, 2, 3], max_tokens=2).status == 200
    except (OSError, HTTPException):
        return False


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        pytest.param(EXCEPTION, "RuntimeError: a kernel went wrong", id="exception"),
        pytest.param(NO_MEMORY, "can't allocate memory", id="memory"),
        pytest.param(ENDLESS, "worker 0 has made no progress", id="endless"),
        pytest.param(WRONG_RESULT, "InvariantError: step ", id="wrong-result"),
    ],
)
def test_a_fault_in_a_step_is_an_error_for_all_and_the_end_for_none(
    server: Server, token: int, reason: str
) -> None:
    opened = start_load(server, streams=2, wholes=1)
    since = time.monotonic()
    opened.append(OpenWhole(server, [5, token, 6]))
    assert {request.outcome() for request in opened} == {"error"}
    assert reason in opened[-1].body["error"]["message"] and opened[-1].status == 503
    assert eventually_true(lambda: works(server), 60), server.log.read_text()[-3000:]
    print(f"recovery: {reason}, streaming: {time.monotonic() - since:.2f} s")
    assert reason in server.log.read_text()
