"""What an output parser reads from and writes to: text in any chunking, events out.

A parser of output is a coroutine (``Steps``) that reads characters as if the whole text were there
and is suspended wherever the text known so far ends. So it is written as a parser of whole texts
is, and how the text was cut cannot show in its events: only how often they come. Rules that keep
it so: decide on characters, never on where a chunk ends; what is held back until a decision is
found behind ``mark``.

    buffer   |....................................|
             0       mark          pos            len
                     |--given back-|--not read----|     while a call may still turn out to be none

Owns the text that is not decided yet, and the events not taken yet.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import TypeVar

from zlm.tokenizer.tools_schemas import Functions

T = TypeVar("T")
Steps = Generator[None, None, T]  # suspended until there is more text, or its end is known

SPACE = " \t\r\n"
IDENTIFIER = frozenset(f"{ascii_letters}{digits}_")
NAME = IDENTIFIER | frozenset(".:/-")  # of a function


class MalformedError(Exception):
    """The text is not what the format asks for; it is content then, from ``mark`` on."""


class EnoughError(Exception):
    """As many calls are complete as are wanted; the rest of the text is not."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thoughts before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. Its arguments follow. ``id``: the model's own, if the format has any."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON of the call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. One that the text's end cuts, or that breaks, has no end."""


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Source:
    """The text, as far as it is known. Characters are read at ``pos``."""

    __slots__ = ("buffer", "cut", "ended", "mark", "pos", "seen_end")

    def __init__(self) -> None:
        self.buffer = ""
        self.pos = 0
        self.ended = False
        self.cut = False  # it ended at a limit, wherever that was
        self.seen_end = False  # something was decided by where it ends
        self.mark: int | None = None  # text from here on is kept: it may have to be given back

    def add(self, text: str) -> None:
        """Take more text, and forget what is read and not marked."""
        keep = self.pos if self.mark is None else self.mark
        self.buffer = self.buffer[keep:] + text
        self.pos -= keep
        if self.mark is not None:
            self.mark = 0

    def is_over(self) -> bool:
        """Tell whether no text follows what is known, where that matters."""
        self.seen_end = self.ended
        return self.ended

    def rest(self) -> str:
        """Return what is not read."""
        return self.buffer[self.pos :]

    def take_back(self) -> str:
        """Return what was read since the mark, and remove the mark."""
        assert self.mark is not None, "nothing is marked"
        text = self.buffer[self.mark : self.pos]
        self.mark = None
        return text

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self.pos >= len(self.buffer):
            if self.is_over():
                return ""
            yield
        return self.buffer[self.pos]

    def skip_space(self) -> Steps[str]:
        """Read white space; return the character after it as ``peek`` does."""
        while True:
            character = yield from self.peek()
            if not character or character not in SPACE:
                return character
            self.pos += 1

    def run_of(self, characters: frozenset[str]) -> Steps[str]:
        """Return the longest run of *characters* that stands here, without reading it."""
        length = 0
        while True:
            text = self.buffer
            while self.pos + length < len(text) and text[self.pos + length] in characters:
                length += 1
            if self.pos + length < len(text) or self.is_over():
                return text[self.pos : self.pos + length]
            yield

    def optional(self, literal: str, *, cut: bool = False) -> Steps[bool]:
        """Read *literal* if it stands there; with *cut*, also what the text's end leaves of it."""
        while True:
            text = self.buffer[self.pos : self.pos + len(literal)]
            if text == literal or (cut and self.ended and text and literal.startswith(text)):
                self.pos += len(text)
                return True
            if not literal.startswith(text) or self.is_over():
                return False
            yield

    def one_of(self, literals: tuple[str, ...]) -> Steps[str]:
        """Read and return the one of *literals* that stands there; MalformedError if none does.

        What the text's end leaves of one is read as well before that.
        """
        for literal in literals:
            if (yield from self.optional(literal)):
                return literal
        if self.ended and any(literal.startswith(self.rest()) for literal in literals):
            self.pos = len(self.buffer)
        raise MalformedError

    def expect(self, literal: str) -> Steps[None]:
        """Read *literal*; MalformedError, with nothing read, if something else stands there."""
        if not (yield from self.optional(literal)):
            raise MalformedError


class Sink:
    """Takes what a parser finds. Owns the events until they are taken, and counts the calls."""

    __slots__ = ("_most_calls", "_source", "completed", "events")

    def __init__(self, source: Source, *, most_calls: int | None = None) -> None:
        """*most_calls*: after so many complete calls the parser is to stop."""
        self.events: list[Event] = []
        self.completed = 0
        self._source = source
        self._most_calls = most_calls

    def content(self, text: str) -> None:
        if text:
            self.events.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call is certain: nothing of it will be given back as content."""
        self._source.mark = None
        self.events.append(CallBegin(name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(CallArguments(text))

    def end(self) -> None:
        self.completed += 1
        self.events.append(CallEnd())
        if self.completed == self._most_calls:
            raise EnoughError

    def broken(self, *, opened: bool = False) -> None:
        """What was read as a call is none: it is content, but for what has been told of it.

        *opened*: a text that stands before calls alone was read, so one that is cut is no content.
        """
        source = self._source
        if opened and source.cut and source.seen_end:
            source.pos, source.mark = len(source.buffer), None
        if source.mark is not None:
            self.content(source.take_back())


# What reads one choice's whole text.
Reader = Callable[[Source, Sink, Functions], Steps[None]]


def among(
    starts: tuple[str, ...],
    read: Callable[[Source, Sink, Functions, str], Steps[None]],
    closing: str = "",
) -> Reader:
    """Return the format of calls among content.

    *read* goes on behind the one of *starts* that is given to it; *closing* may follow the calls.
    """

    def reader(source: Source, sink: Sink, functions: Functions) -> Steps[None]:
        while (start := (yield from until(source, starts, sink.content))) is not None:
            try:
                yield from read(source, sink, functions, start)
            except MalformedError:
                sink.broken(opened=True)
                continue
            yield from source.skip_space()
            yield from source.optional(closing, cut=True)
            yield from source.skip_space()

    return reader


def until(
    source: Source, markers: tuple[str, ...], emit: Callable[[str], None]
) -> Steps[str | None]:
    """Give *emit* the text up to the first marker and read that; None when there is none to come.

    White space before the marker is not given: the mark stands at its start. The start of a
    possible marker is held back.
    """
    while True:
        text = source.rest()
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        end, marker = min(found) if found else (_possible_start(text, markers), "")
        body = text[:end].rstrip(SPACE)
        emit(body)
        source.pos += len(body)
        if found:
            source.mark = source.pos
            source.pos += end - len(body) + len(marker)
            return marker
        if source.ended:
            emit(source.rest())
            source.pos = len(source.buffer)
            return None
        yield


def verbatim(source: Source, ends: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str]:
    """Give *emit* the text up to the first of *ends*, every character of it, and read that.

    MalformedError when the text is over before; then the start of a possible end is not given.
    """
    while True:
        text = source.rest()
        found = [(at, end) for end in ends if (at := text.find(end)) >= 0]
        stop, end = min(found) if found else (_possible_start(text, ends), "")
        emit(text[:stop])
        source.pos += stop + len(end)
        if found:
            return end
        if source.is_over():
            source.pos = len(source.buffer)
            raise MalformedError
        yield


def drop(text: str) -> None:
    """Take text that nobody needs."""


def _possible_start(text: str, markers: tuple[str, ...]) -> int:
    """Return where at the end of *text* a marker may have begun."""
    earliest = len(text)
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), 0, -1):
            if marker.startswith(text[len(text) - length :]):
                earliest = min(earliest, len(text) - length)
                break
    return earliest
