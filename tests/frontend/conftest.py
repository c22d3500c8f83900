"""Houses: front ends without sockets, loop or other processes (see ``frontend_house``)."""

from collections.abc import Callable
from typing import Any

import pytest
from frontend_house import House, answer, delta, render, resolved

from zlm.config import Resolved, ServerLimits
from zlm.messages import Delta, Launch, ServerState


@pytest.fixture
def make_house() -> Callable[..., House]:
    """Make a house that is ready; keywords are ServerOptions' (``limits`` a dict)."""

    def make(*, num_tokenizers: int = 1, ready: bool = True, **server: Any) -> House:
        house = House(num_tokenizers=num_tokenizers)
        if "limits" in server:
            server["limits"] = ServerLimits(**server["limits"])
        house.take(Launch(resolved(**server)))
        if ready:
            house.take(ServerState("ready"))
        return house

    return make


@pytest.fixture
def make_resolved() -> Callable[..., Resolved]:
    return resolved


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house()


@pytest.fixture
def bare_house() -> House:
    """A house that no Launch has reached."""
    return House()


@pytest.fixture
def make_delta() -> Callable[..., Delta]:
    return delta


@pytest.fixture
def render_request() -> Callable[..., bytes]:
    return render


@pytest.fixture
def default_answer() -> Callable[[Any], list[Any]]:
    return answer
