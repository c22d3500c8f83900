"""Scripted servers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_server import Script, ScriptedServer


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    """Start a server that answers by a script: scripted(first=0.05, ...)."""
    started: list[ScriptedServer] = []

    def start(**script: Any) -> ScriptedServer:
        started.append(ScriptedServer(Script(**script)).__enter__())
        return started[-1]

    yield start
    for server in started:
        server.__exit__()
