"""One connection to a server under test: a request at a time, and when its answer's events came.

A protocol over httptools rather than streams: 2 µs of CPU an event beside the loop's read, some 15
µs in all where each event is a read of its own. Knows HTTP and the forms of OpenAI's answers; knows
nothing of what is asked, of other connections or of figures.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

ECHO_BYTES = 300  # how much of a refusal is kept
clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: the same for all processes


@dataclass(slots=True)
class Record:
    """What one request saw. Times in seconds on the monotonic clock; 0.0: never."""

    asked_tokens: int
    planned_input_tokens: int = 0
    intended: float = 0.0  # when it was to be sent; in a closed loop, when it was
    sent: float = 0.0
    times: array = field(default_factory=lambda: array("d"))  # of reads that brought output
    counts: array = field(default_factory=lambda: array("L"))  # events of output in each
    ended: float = 0.0  # when the answer was complete
    input_tokens: int = 0  # from usage; 0: not told
    usage_tokens: int = 0  # likewise, of the output
    error: str = ""  # its kind; empty: the answer is whole
    detail: str = ""
    text: str = ""  # the answer, if it is kept

    @property
    def events(self) -> int:
        """Events that carried output."""
        return sum(self.counts)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: as usage tells, or else one for each event."""
        return self.usage_tokens or self.events

    def fail(self, kind: str, detail: object) -> None:
        """Note what went wrong first."""
        if not self.error:
            self.error, self.detail = kind, str(detail)[:ECHO_BYTES]


class _Part(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def carries_output(self) -> bool:
        """Whether there is output here, and not only who speaks or that it ends."""
        part = self.delta
        if part is None:
            return bool(self.text or self.token_ids) or self.finish_reason is None
        said = part.content or part.reasoning_content or part.reasoning or part.tool_calls
        return bool(said) or (part.role is None and self.finish_reason is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Connection(asyncio.Protocol):
    """One connection. Owns its socket and parser; fills in the record of the request it carries."""

    def __init__(self, lost: Callable[["Connection"], None]) -> None:
        """*lost* is told when the connection closes."""
        # Lifetime: the connection
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self.is_usable = False  # can carry another request
        # Lifetime: a request
        self._record: Record | None = None
        self._finished: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._keeps_text = False
        self._is_streamed = False
        self._start_answer()

    def _start_answer(self) -> None:
        self.has_answer = False  # a byte of it came
        self._status = 0
        self._content = b""  # not yet looked at: an event's beginning, or a body that is no stream
        self._new = 0  # events of output in this read
        self._is_complete = self._is_done = False  # HTTP's end came; [DONE] came

    async def ask(self, request: bytes, record: Record, *, streamed: bool, keep_text: bool) -> None:
        """Send *request* and fill *record* until the answer has ended, well or not."""
        assert self._transport is not None and self._record is None
        self._start_answer()
        self._record, self._keeps_text, self._is_streamed = record, keep_text, streamed
        self._parser = httptools.HttpResponseParser(self)
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._finished

    def close(self) -> None:
        """Close the connection; a request that it carries has failed."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.close()

    def give_up(self, kind: str, detail: str) -> None:
        """End the request that is carried as failed, and the connection with it."""
        if self._record is not None:
            self._record.fail(kind, detail)
        if self._transport is not None:
            self._transport.abort()

    # -------------------------------------------------------------------- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_usable = True

    def data_received(self, data: bytes) -> None:
        now = clock()
        record, parser = self._record, self._parser
        if record is None or parser is None:  # nobody asked
            self.close()
            return
        self.has_answer = True
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:  # also around what a callback raises
            self.give_up("protocol", str(error.__context__ or error))
            return
        if self._new:
            record.times.append(now)
            record.counts.append(self._new)
            self._new = 0
        if self._is_complete:
            self._finish(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._lost(self)
        self._finish(clock())

    def _finish(self, now: float) -> None:
        record, self._record = self._record, None
        finished, self._finished = self._finished, None
        if record is None or finished is None:
            return
        record.ended = now
        if self._status and self._status != 200:
            record.fail(f"http_{self._status}", self._content[:ECHO_BYTES].decode(errors="replace"))
        elif not (self._is_complete or self._is_done):
            record.fail("disconnected", "the connection closed before the answer's end")
        elif self._is_streamed and not self._is_done:
            record.fail("protocol", "the stream ended without [DONE]")
        if not self._is_complete:
            self.close()
        if not finished.done():
            finished.set_result(None)

    # -------------------------------------------------------------------- from the parser

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._is_streamed or self._status != 200:
            self._content += body
            return
        *lines, self._content = (self._content + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self._is_complete = True
        assert self._parser is not None
        self.is_usable = self.is_usable and self._parser.should_keep_alive()
        if not self._is_streamed and self._status == 200:
            self._event(self._content)

    def _event(self, data: bytes) -> None:
        """Take note of one event of a stream, or of a body that is the whole answer."""
        record = self._record
        assert record is not None
        if data == b"[DONE]":
            self._is_done = True
            return
        event = _decode(data)
        if event.error is not None:
            record.fail("in_stream", data[:ECHO_BYTES].decode(errors="replace"))
        if event.usage is not None:
            record.input_tokens = event.usage.prompt_tokens or record.input_tokens
            record.usage_tokens = event.usage.completion_tokens or record.usage_tokens
        for choice in event.choices or ():
            if choice.carries_output:
                self._new += 1
                break
        if self._keeps_text:
            for choice in event.choices or ():
                part = choice.delta or choice.message
                record.text += (part.content if part is not None else choice.text) or ""
