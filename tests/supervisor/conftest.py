"""Servers of fake processes, ended with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_tree import Server

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers = []

    def start(**keywords: Any) -> Server:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(Server(folder, **keywords))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def serve(start: Start) -> Start:
    """Start a server and wait until it serves, which is the last line read."""

    def serve(**keywords: Any) -> Server:
        server = start(**keywords)
        server.until("serving tiny-model on")
        return server

    return serve
