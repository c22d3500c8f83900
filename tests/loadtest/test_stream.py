"""A connection: which bytes are output, at which moment, and what is no whole answer."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from zlm.loadtest import stream
from zlm.loadtest.stream import Connection, Record

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return chunk(
        b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    )


def text(said: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish}]})


def delta(finish: str | None = None, **part: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": part, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
DONE = event(b"[DONE]")
END = USAGE + DONE + LAST


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.written = b""
        self._connection = connection
        self._is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._connection.connection_lost(None)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Read each piece at its moment of a clock that the test sets; return record and connection."""
    now = [0.0]
    monkeypatch.setattr(stream, "clock", lambda: now[0])

    async def run(*reads: tuple[float, bytes], closes: bool = False, **how: bool) -> Any:
        connection = Connection(lambda _: None)
        connection.connection_made(Wire(connection))
        record = Record(4)
        how = {"streamed": True, "keep_text": True} | how
        asked = asyncio.create_task(connection.ask(b"POST", record, **how))
        await asyncio.sleep(0)
        for moment, data in reads:
            now[0] = moment
            connection.data_received(data)
        if closes:
            connection.connection_lost(None)
        await asyncio.wait_for(asked, 1)
        return record, connection

    return run


async def test_moments_are_those_of_reads_with_output(answered: Callable) -> None:
    record, connection = await answered(
        (1.0, HEAD + delta(role="assistant", content="")),  # who speaks: no output
        (1.5, delta(content="a")),
        (1.75, delta(content="b") + delta(content="c")),
        (2.0, delta(reasoning_content="hm")),
        (2.25, delta("stop")),  # only that it ends
        (2.5, USAGE),
        (3.0, DONE + LAST),
    )
    assert not record.error
    assert list(record.times) == [1.5, 1.75, 2.0] and list(record.counts) == [1, 2, 1]
    assert (record.input_tokens, record.usage_tokens, record.ended) == (3, 4, 3.0)
    assert record.text == "abc" and connection.is_usable


async def test_output_without_text(answered: Callable) -> None:
    """Token ids, tool calls, and a token whose text is held back, count; an empty end does not."""
    ids = event({"choices": [{"text": "", "token_ids": [7], "finish_reason": "length"}]})
    record, _ = await answered(
        (1.0, HEAD + text("")), (2.0, ids), (3.0, delta(tool_calls=[{"index": 0}])),
        (4.0, text("", "stop") + END),
    )  # fmt: skip
    assert list(record.times) == [1.0, 2.0, 3.0]


async def test_bytes_may_be_cut_anywhere(answered: Callable) -> None:
    whole = HEAD + text("é") + text("b") + END
    for cut in range(1, len(whole)):
        record, _ = await answered((1.0, whole[:cut]), (2.0, whole[cut:]))
        assert (record.error, record.events, record.text) == ("", 2, "éb"), cut
        assert set(record.times) <= {1.0, 2.0} and record.ended == 2.0


async def test_events_may_be_cut_by_chunks_and_end_in_crlf(answered: Callable) -> None:
    data = b'data: {"choices":[{"text":"a"}]}\r\n\r\n: a comment\r\n\r\ndata: [DONE]\r\n\r\n'
    pieces = b"".join(chunk(data[at : at + 5]) for at in range(0, len(data), 5))
    record, _ = await answered((1.0, HEAD + pieces + LAST))
    assert (record.error, record.events, record.usage_tokens, record.output_tokens) == ("", 1, 0, 1)


async def test_an_answer_without_length_ends_with_its_connection(answered: Callable) -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    record, _ = await answered(
        (1.0, head), (2.0, b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'), closes=True
    )
    assert not record.error and list(record.times) == [2.0]


async def test_an_answer_that_is_no_stream(answered: Callable) -> None:
    body = json.dumps(
        {"choices": [{"message": {"content": "ab"}}], "usage": {"completion_tokens": 2}}
    )
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
    record, _ = await answered((1.0, head.encode()), (2.0, body.encode()), streamed=False)
    assert (record.error, record.text, record.usage_tokens, record.ended) == ("", "ab", 2, 2.0)


REFUSAL = b'HTTP/1.1 429 X\r\nContent-Length: 16\r\n\r\n{"error":"busy"}'


@pytest.mark.parametrize(
    ("answer", "kind", "detail", "usable"),
    [
        (REFUSAL, "http_429", "busy", True),
        (HEAD + text("a") + event({"error": "broke"}) + END, "in_stream", "broke", True),
        (HEAD + text("a") + LAST, "protocol", "[DONE]", True),
        (HEAD + chunk(b"data: {no JSON\n\n"), "protocol", "malformed", False),
        (b"SMTP 220\r\n\r\n", "protocol", "", False),
        (HEAD + text("a"), "disconnected", "before the answer's end", False),
        (b"", "disconnected", "before the answer's end", False),
    ],
    ids=["refused", "error event", "no end", "no JSON", "no HTTP", "cut", "silent"],
)  # fmt: skip
async def test_what_is_no_whole_answer(
    answered: Callable, answer: bytes, kind: str, detail: str, usable: bool
) -> None:
    record, connection = await answered((1.0, answer), closes=kind == "disconnected")
    assert record.error == kind and detail in record.detail
    assert connection.is_usable == usable


async def test_a_connection_that_is_to_close_is_not_used_again(answered: Callable) -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    record, connection = await answered((1.0, head + text("a") + END))
    assert not record.error and not connection.is_usable
