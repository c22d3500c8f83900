"""Typed sockets: order, connecting before binding, draining under load, undecodable frames."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from zlm.ipc.sockets import AsyncInbox, Inbox, MessageError, Outbox, address
from zlm.messages import Abort, Drained, Progress

ACCEPTS = Progress | Drained
PATIENCE_MS = 20_000


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def at(tmp_path: Path) -> str:
    return address(tmp_path, "engine")


def take(inbox: Inbox, count: int) -> list[Any]:
    """Return *count* messages of *inbox* and see that no more wait."""
    messages: list[Any] = []
    while len(messages) < count:
        news = inbox.receive(PATIENCE_MS)
        assert news, f"only {len(messages)} of {count} messages came"
        messages += news
    assert inbox.receive(0) == []
    return messages[:count]


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while not condition():
            await asyncio.sleep(0)


def test_order_is_kept_and_what_was_sent_before_the_bind_arrives(
    context: zmq.Context, at: str
) -> None:
    outbox = Outbox(context, at)
    for number in range(1000):
        outbox.send(Drained(number))
    inbox = Inbox(context, at, ACCEPTS)
    assert take(inbox, 1000) == [Drained(number) for number in range(1000)]


def test_what_waits_comes_at_once(context: zmq.Context, at: str) -> None:
    inbox = Inbox(context, at, ACCEPTS)
    outbox = Outbox(context, at)
    for number in range(3):
        outbox.send(Drained(number))
    while not inbox._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        pass
    first = inbox.receive()  # all three, unless some are still under way
    assert first + take(inbox, 3 - len(first)) == [Drained(number) for number in range(3)]


def test_waiting_ends_at_its_time(context: zmq.Context, at: str) -> None:
    inbox = Inbox(context, at, ACCEPTS)
    assert inbox.receive(0) == []
    assert inbox.receive(20) == []


def test_a_bad_frame_raises_after_the_messages_before_it(context: zmq.Context, at: str) -> None:
    inbox = Inbox(context, at, ACCEPTS)
    outbox = Outbox(context, at)
    for message in (Drained(1), Abort([7]), Drained(2)):  # Abort is none of this inbox's messages
        outbox.send(message)
    outbox._socket.send(b"\xc1 no msgpack")
    assert inbox.receive(PATIENCE_MS) == [Drained(1)]
    with pytest.raises(MessageError, match=r"engine-0.sock got \d+ bytes"):
        inbox.receive(PATIENCE_MS)
    assert inbox.receive(PATIENCE_MS) == [Drained(2)]
    with pytest.raises(MessageError):
        inbox.receive(PATIENCE_MS)


async def test_async_inbox_takes_what_waited_before_it_watched(
    context: zmq.Context, at: str
) -> None:
    outbox = Outbox(context, at)
    outbox.send(Drained(1))
    got: list[Any] = []
    inbox = AsyncInbox(context, at, ACCEPTS, got.append)
    await until(lambda: got)
    assert got == [Drained(1)]
    inbox.close()
    inbox.close()


async def test_async_inbox_loses_nothing_under_load(context: zmq.Context, at: str) -> None:
    """Bursts from two threads, far over the messages of one turn, with lulls between them."""
    senders, bursts, size = 2, 20, 3 * AsyncInbox.MESSAGES_A_TURN
    got: list[Drained] = []
    inbox = AsyncInbox(context, at, ACCEPTS, got.append)
    loop = asyncio.get_running_loop()
    lull = [threading.Event() for _ in range(bursts + 1)]
    lull[0].set()

    def send(sender: int) -> None:
        outbox = Outbox(context, at, linger_ms=PATIENCE_MS)
        for burst in range(bursts):
            assert lull[burst].wait(PATIENCE_MS / 1000)
            for number in range(size):
                outbox.send(Drained((burst * size + number) * senders + sender))
        outbox.close()

    work = [loop.run_in_executor(None, send, sender) for sender in range(senders)]
    for burst in range(1, bursts + 1):
        await until(lambda: len(got) == burst * size * senders)  # noqa: B023
        lull[burst].set()
    await asyncio.gather(*work)
    for sender in range(senders):
        mine = [message.index for message in got if message.index % senders == sender]
        assert mine == sorted(mine) and len(mine) == bursts * size
    inbox.close()


async def test_async_inbox_keeps_the_loop_responsive(context: zmq.Context, at: str) -> None:
    outbox = Outbox(context, at)
    total = 20 * AsyncInbox.MESSAGES_A_TURN
    for number in range(total):
        outbox.send(Drained(number))
    got: list[Any] = []
    turns = 0
    inbox = AsyncInbox(context, at, ACCEPTS, got.append)
    while len(got) < total:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 20
    inbox.close()


async def test_async_errors_go_to_the_callback_and_the_rest_follows(
    context: zmq.Context, at: str
) -> None:
    outbox = Outbox(context, at)
    errors: list[Exception] = []
    got: list[int] = []

    def handler(message: Drained) -> None:
        if message.index == 1:
            raise KeyError(message.index)
        if message.index == 2:
            raise msgspec.ValidationError("of a handler's own")
        got.append(message.index)

    inbox = AsyncInbox(context, at, ACCEPTS, handler, on_error=errors.append)
    for message in (Drained(0), Drained(1), Abort([7]), Drained(2), Drained(3)):
        outbox.send(message)
    await until(lambda: 3 in got)
    assert got == [0, 3]
    kinds = [type(error) for error in errors]
    assert kinds == [KeyError, MessageError, msgspec.ValidationError]
    inbox.close()


async def test_async_errors_without_a_callback_reach_the_loop(
    context: zmq.Context, at: str
) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, facts: told.append(facts))
    got: list[Any] = []
    inbox = AsyncInbox(context, at, ACCEPTS, got.append)
    outbox = Outbox(context, at)
    outbox.send(Abort([7]))
    outbox.send(Drained(3))
    await until(lambda: got)
    assert isinstance(told[0]["exception"], MessageError)
    inbox.close()


async def test_closing_in_a_handler_ends_the_draining(context: zmq.Context, at: str) -> None:
    outbox = Outbox(context, at)
    for number in range(3):
        outbox.send(Drained(number))
    got: list[Any] = []

    def handler(message: Any) -> None:
        got.append(message)
        inbox.close()

    inbox = AsyncInbox(context, at, ACCEPTS, handler)
    await until(lambda: got)
    await asyncio.sleep(0)
    assert got == [Drained(0)]
