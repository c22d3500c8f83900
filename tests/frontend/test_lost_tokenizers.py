"""Tokenizers that die and are replaced, as a front end sees it; health; the server's own probe.

CASE 95, as far as a front end goes.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from frontend_house import House

from zlm.errors import Overloaded
from zlm.frontend.health import Health
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.probe import send_probe
from zlm.messages import (
    Cancel,
    Delta,
    Deltas,
    Failed,
    Generate,
    ServerState,
    Tokenize,
    first_id,
)
from zlm.process import heartbeat
from zlm.process.heartbeat import Heartbeat


def silent(_: Any) -> list[Any]:
    return []


def test_requests_of_a_lost_tokenizer_end_and_those_of_others_go_on(
    make_house: Callable[..., House],
) -> None:
    house = make_house(num_tokenizers=2)
    house.tokenizer = silent
    clients = [house.client() for _ in range(4)]
    for client in clients:
        client.request("POST", "/v1/completions", {"prompt": "x"})
    assert sorted(house.sent_to) == [0, 0, 1, 1]
    house.open.lose(1, Overloaded("the request was lost, try again (tokenizer 1 died)"))
    house.loop.turn()
    answered = [client.responses() for client in clients]
    ended = [number for number, responses in enumerate(answered) if responses]
    assert [house.sent_to[number] for number in ended] == [1, 1]
    for number in ended:
        [response] = answered[number]
        assert response.status == 503 and "tokenizer 1 died" in response.body.decode()
    assert house.open.loads == [2, 0]
    house.client().request("POST", "/v1/completions", {"prompt": "x"})
    assert house.sent_to[-1] == 0  # although the other has less to do


def test_without_any_tokenizer_clients_are_told_to_try_again(
    make_house: Callable[..., House],
) -> None:
    house = make_house()
    house.open.lose(0, Overloaded("it died"))
    answer = house.ask("POST", "/v1/completions", {"prompt": "x"})
    assert answer.status == 503 and answer.headers["retry-after"]
    assert house.ask("GET", "/health").status == 503
    assert house.ask("GET", "/health/live").status == 200
    sent: list[Any] = []
    house.open.reconnect(0, sent.append)
    assert house.ask("GET", "/health").status == 200
    house.client().request("POST", "/v1/completions", {"prompt": "x"})
    assert len(sent) == 1


def test_a_client_that_leaves_after_its_tokenizer_died_cancels_nothing() -> None:
    sent: list[Any] = []
    opened = OpenRequests(0, lambda function: None, incarnation=2)
    opened.connect([sent.append])
    request_id = opened.new_id()
    assert request_id == first_id(0, 2) + 1
    stub = SimpleNamespace(fail=lambda error: None)
    opened.submit(request_id, Tokenize(request_id), stub)  # type: ignore[arg-type]
    opened.lose(0, Overloaded("it died"))
    opened.cancel(request_id)
    assert not any(isinstance(message, Cancel) for message in sent) and len(opened) == 0


def test_while_the_engine_is_restarted_clients_are_told_when_to_come_back(
    make_house: Callable[..., House],
) -> None:
    house = make_house()
    house.take(ServerState("restarting", "engine 0 died; it is restarted", 17))
    for path in ("/v1/models", "/health", "/health/ready"):
        answer = house.ask("GET", path)
        assert (answer.status, answer.headers["retry-after"]) == (503, "17")
        assert "engine 0 died" in answer.body.decode()
    house.take(ServerState("ready"))
    assert house.ask("GET", "/health").status == 200


def test_health_tells_of_a_process_that_does_not_run(
    make_house: Callable[..., House], tmp_path: Path
) -> None:
    house = make_house(health_timeout_seconds=3)
    heartbeat.create(tmp_path, 4)
    beats = [Heartbeat(tmp_path, n, role, 0) for n, role in enumerate(("engine", "worker"))]
    Heartbeat(tmp_path, 2, "frontend", 0)  # is no business of its neighbour
    resolved = house.server.endpoints._serving()
    health = house.server.health = Health(tmp_path, resolved)
    for second in range(5):
        for beat in beats:
            beat.alive()
        health.look(100.0 + second)
    assert house.ask("GET", "/health").status == 200
    for second in range(5, 10):
        beats[0].alive()
        health.look(100.0 + second)
    answer = house.ask("GET", "/health")
    assert answer.status == 503 and "worker 0 has not run for" in answer.body.decode()
    assert house.ask("GET", "/health/live").status == 200
    beats[1].alive()
    health.look(110.0)
    assert house.ask("GET", "/health").status == 200


# ---------------------------------------------------------------------------------- the probe


def probe(house: House) -> tuple[list[str], Any]:
    """Start a probe; return where its outcome goes, and the command it made."""
    outcomes: list[str] = []
    house.tokenizer = silent
    send_probe(house.open, house.server.endpoints._serving(), outcomes.append)
    return outcomes, house.commands[-1]


def test_the_probe_has_one_token_made(house: House) -> None:
    outcomes, command = probe(house)
    assert isinstance(command, Generate) and command.params.max_tokens == 1
    assert len(command.prompts[0]) == 1 and outcomes == []
    delta = Delta(command.request_id, 0, "x", 1, 0, 1, "length")
    house.take(Deltas([delta]))
    assert outcomes == [""] and len(house.open) == 0


def test_a_probe_that_fails_says_why(house: House) -> None:
    outcomes, command = probe(house)
    house.take(Failed(command.request_id, 500, "x", "the first token is NaN"))
    assert outcomes == ["the first token is NaN"] and len(house.open) == 0
    outcomes, command = probe(house)
    house.take(Deltas([Delta(command.request_id, 0, "", 1, 0, 0, "abort")]))
    assert outcomes == ["no token came out, it ended with abort"]
    house.open.lose(0, Overloaded("it died"))
    outcomes = []
    send_probe(house.open, house.server.endpoints._serving(), outcomes.append)
    assert outcomes == ["every tokenizer is being restarted; try again"]
