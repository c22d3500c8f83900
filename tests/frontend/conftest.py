"""Houses: front ends without sockets, loop or other processes (see ``frontend_house``)."""

from collections.abc import Callable
from typing import Any

import pytest
from frontend_house import answer, bare_house, delta, house, make_house, make_resolved, render

from zlm.messages import Delta

__all__ = ["bare_house", "house", "make_house", "make_resolved"]


@pytest.fixture
def make_delta() -> Callable[..., Delta]:
    return delta


@pytest.fixture
def render_request() -> Callable[..., bytes]:
    return render


@pytest.fixture
def default_answer() -> Callable[[Any], list[Any]]:
    return answer
