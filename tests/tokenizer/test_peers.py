"""A tokenizer whose engine or front ends die: who is sent what, and what becomes of requests.

CASE 95, as far as a tokenizer goes: news of a death come in any order, answers come once.
"""

from collections.abc import Callable
from typing import Any

import pytest
from fake_peers import FakeChild

from zlm.messages import (
    FINISH_LENGTH,
    OWNER_SHIFT,
    EngineReady,
    Failed,
    Grammar,
    Launch,
    PeerLost,
    PeerUp,
    Tokenize,
    first_id,
    incarnation_of,
)
from zlm.tokenizer.peers import Peers


@pytest.fixture
def child() -> FakeChild:
    return FakeChild()


@pytest.fixture
def make_peers(make_engine: Callable[..., Any], child: FakeChild) -> Callable[..., Peers]:
    def make(*incarnations: tuple[str, int, int]) -> Peers:
        return Peers(child, Launch(make_engine().resolved, list(incarnations)))  # type: ignore[arg-type]

    return make


def test_ids_say_who_made_them() -> None:
    made = first_id(5, 3) + 12345
    assert (made >> OWNER_SHIFT, incarnation_of(made)) == (5, 3)
    assert first_id(5, 4) > first_id(5, 3) + 2**35 and first_id(5, 4096) == first_id(5, 0)


def test_the_engine_that_is_ready_is_sent_to_and_a_dead_one_is_not(
    make_peers: Callable[..., Peers], child: FakeChild
) -> None:
    peers = make_peers()
    assert peers.engine_is_new(0)
    peers.connect_engine(0)
    assert ("engine", 0, 0) in child.living() and not peers.engine_is_new(0)
    assert peers.engine_lost(0) and not peers.engine_lost(0)
    assert not peers.engine_is_new(0)  # its EngineReady was under way when it died
    assert [to for to in child.living() if to[0] == "engine"] == []
    assert peers.engine_is_new(1)


def test_the_loss_of_an_engine_that_was_replaced_is_no_news(
    make_peers: Callable[..., Peers], child: FakeChild
) -> None:
    peers = make_peers()
    peers.connect_engine(0)
    peers.connect_engine(1)  # its EngineReady overtook the supervisor's word
    assert not peers.engine_lost(0)
    assert [to for to in child.living() if to[0] == "engine"] == [("engine", 0, 1)]
    assert peers.engine_lost(1)


def test_a_front_end_that_is_lost_is_sent_nothing_until_it_is_there_again(
    make_peers: Callable[..., Peers], child: FakeChild
) -> None:
    peers = make_peers()
    answer = Failed(first_id(0, 0), 500, "x", "y")
    peers.to_frontend(0, answer)
    assert child.opened[0].sent == [answer]
    assert peers.frontend_changed(PeerLost("frontend", 0, 0))
    peers.to_frontend(0, answer)  # to nobody
    assert child.living() == []
    assert peers.is_from_the_dead(first_id(0, 0) + 9)
    assert peers.frontend_changed(PeerUp("frontend", 0, 1))
    assert child.living() == [("frontend", 0, 1)]
    assert not peers.frontend_changed(PeerLost("frontend", 0, 0))
    assert peers.is_from_the_dead(first_id(0, 0) + 9)
    assert not peers.is_from_the_dead(first_id(0, 1) + 9)


def test_a_successors_request_may_overtake_the_news_of_it(
    make_peers: Callable[..., Peers], child: FakeChild
) -> None:
    peers = make_peers(("frontend", 0, 2))
    assert child.living() == [("frontend", 0, 2)]
    request = first_id(0, 3) + 1
    assert not peers.is_from_the_dead(request) and peers.follow_successor(request)
    assert child.living() == [("frontend", 0, 3)] and not peers.follow_successor(request)
    assert not peers.frontend_changed(PeerLost("frontend", 0, 2))
    assert not peers.frontend_changed(PeerUp("frontend", 0, 3))


def test_incarnations_may_be_counted_round(make_peers: Callable[..., Peers]) -> None:
    peers = make_peers(("frontend", 0, 4095))
    assert peers.follow_successor(first_id(0, 4096))
    assert peers.is_from_the_dead(first_id(0, 4095))


# ------------------------------------------------------------------------------- requests


def test_what_the_engine_had_ends_with_one_error_and_late_news_of_it_are_dropped(
    make_engine: Callable[..., Any],
) -> None:
    engine = make_engine()
    [running] = engine.generate(request_id=1)
    waiting = engine.generate(["a", "b"], request_id=2)
    engine.core.lose_engine("engine 0 died")
    assert [answer.request_id for answer in engine.answers] == [1, 2]
    for answer in engine.answers:
        assert answer.status == 503 and "engine 0 died" in answer.message
        assert answer.retry_after_seconds
    assert engine.aborts == []  # there is nobody to tell
    for seq_id in (running.seq_id, waiting[1].seq_id):
        assert engine.step((seq_id, 7, FINISH_LENGTH)) == []
    assert engine.core.open_requests == 0


def test_without_an_engine_a_request_is_refused_and_with_the_next_one_it_runs(
    make_engine: Callable[..., Any],
) -> None:
    engine = make_engine()
    [before] = engine.generate(request_id=1)
    engine.core.lose_engine("engine 0 died")
    assert engine.generate(request_id=2) == []
    assert engine.failed().status == 503
    engine.core.handle(Tokenize(3, prompt="The fox"))  # needs none
    assert engine.answers[-1].request_id == 3 and not isinstance(engine.answers[-1], Failed)
    engine.core.handle(EngineReady([9], 128, incarnation=1))
    [after] = engine.generate(request_id=4)
    assert after.seq_id > before.seq_id
    assert engine.run(after.seq_id, [5])[-1].finish_reason == "length"


def test_the_next_engine_is_told_the_vocabulary_again(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    engine.generate(grammar=Grammar("regex", "a+"))
    engine.core.lose_engine("it died")
    engine.core.handle(EngineReady([9], 128, incarnation=1))
    engine.generate(grammar=Grammar("regex", "a+"), request_id=2)
    assert len(engine.vocabularies) == 2


def test_the_requests_of_a_dead_front_end_are_given_up_and_no_other(
    make_engine: Callable[..., Any],
) -> None:
    engine = make_engine()
    [lost] = engine.generate(request_id=first_id(1, 0) + 1)
    [kept] = engine.generate(request_id=first_id(0, 0) + 1)
    engine.core.lose_frontend(1)
    assert engine.aborts == [lost.seq_id] and engine.answers == []
    assert engine.run(kept.seq_id, [5])[-1].finish_reason == "length"
    assert engine.core.open_requests == 0
