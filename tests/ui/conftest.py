"""The houses of tests/frontend."""

from collections.abc import Callable
from typing import Any

import pytest
from frontend_house import House, resolved

from zlm.config import Resolved
from zlm.messages import Launch, ServerState


@pytest.fixture
def make_resolved() -> Callable[..., Resolved]:
    return resolved


@pytest.fixture
def make_house() -> Callable[..., House]:
    """Make a house that is ready; keywords are ServerOptions'."""

    def make(**server: Any) -> House:
        house = House()
        house.take(Launch(resolved(**server)))
        house.take(ServerState("ready"))
        return house

    return make


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house()


@pytest.fixture
def bare_house() -> House:
    """A house that no Launch has reached."""
    return House()
