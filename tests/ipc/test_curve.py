"""Sockets between machines: who has the key is heard, nobody else; a link tells how it fares."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from zlm.ipc.curve import Keys, derived, stretched
from zlm.ipc.link import Link
from zlm.ipc.sockets import AsyncInbox, Inbox, Outbox, address
from zlm.messages import Drained

PATIENCE_SECONDS = 20.0
ANY = "tcp://127.0.0.1:*"


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def key() -> bytes:
    return stretched(b"what all nodes know")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def test_one_inbox_takes_from_this_machine_and_from_others(
    context: zmq.Context, tmp_path: Path, key: bytes
) -> None:
    keys = Keys.of(derived(key, "engine", 1))
    at = address(tmp_path, "engine")
    inbox = Inbox(context, at, Drained)
    where = inbox.listen(ANY, keys)
    plain, strange = Outbox(context, where), Outbox(context, where, keys=Keys.of(key))
    former = Outbox(context, where, keys=Keys.of(derived(key, "engine", 0)))
    for number, outbox in enumerate((plain, strange, former)):
        outbox.send(Drained(number))
    near, far = Outbox(context, at), Outbox(context, where, keys=keys)
    near.send(Drained(10))
    far.send(Drained(11))
    taken = [message for _ in range(2) for message in inbox.receive(20_000)]
    assert sorted(message.index for message in taken) == [10, 11]
    assert inbox.receive(300) == [], "nobody else is heard, though all were there before"


async def test_a_link_tells_of_a_refusal_and_of_a_cut(context: zmq.Context, key: bytes) -> None:
    keys, heard = Keys.of(key), []
    inbox = AsyncInbox(context, ANY, Drained, heard.append, keys=keys)
    good = Link(context, inbox.address, keys, lambda: None, silence_seconds=5)
    bad = Link(
        context, inbox.address, Keys.of(derived(key, "x")), lambda: None, silence_seconds=5
    )  # fmt: skip
    good.send(Drained(1))
    bad.send(Drained(2))
    await until(lambda: heard and bad.num_refused > 2)
    assert heard == [Drained(1)] and not good.num_refused
    assert not good.was_cut and not bad.was_cut
    inbox.close()
    await until(lambda: good.was_cut)
    assert not bad.was_cut
    good.close()
    bad.close()
    bad.close(100)  # once more does no harm
