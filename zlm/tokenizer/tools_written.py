"""Formats of tool calls that are not JSON: Python calls, and Gemma's function calls.

Coroutines as those of ``tools_json``. Arguments are turned into JSON as they arrive.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from zlm.tokenizer import output_json
from zlm.tokenizer.output_json import MAX_DEPTH, WORD, Out
from zlm.tokenizer.output_source import (
    IDENTIFIER,
    NAME,
    SPACE,
    MalformedError,
    Reader,
    Sink,
    Source,
    Steps,
    among,
    until,
)
from zlm.tokenizer.tools_schemas import Functions

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}
_CODES = {"x": 2, "u": 4, "U": 8}  # escapes with so many hexadecimal digits
_HEX = frozenset("0123456789abcdefABCDEF")


# ------------------------------------------------------------------------------- Python


def pythonic(opening: str, closing: str, *, listed: bool = True) -> Reader:
    """Return the format ``[f(a=1, b="x"), g()]``, at the start of the text or behind *opening*.

    Calls of known functions alone. *listed*: in brackets, else one on each line, behind *opening*.
    """

    def read(source: Source, sink: Sink, functions: Functions) -> Steps[None]:
        source.mark = source.pos
        yield from source.skip_space()
        marked = yield from source.optional(opening)
        while True:
            try:
                if not (listed or marked):
                    raise MalformedError
                yield from source.skip_space()
                if listed:
                    yield from _python_list(source, sink, functions)
                else:
                    yield from _python_lines(source, sink, functions)
                yield from source.skip_space()
                yield from source.optional(closing, cut=True)
                yield from source.skip_space()
            except MalformedError:
                sink.broken(opened=marked)
            marked = (yield from until(source, (opening,), sink.content)) is not None
            if not marked:
                return

    return read


def _python_list(source: Source, sink: Sink, functions: Functions) -> Steps[None]:
    yield from source.expect("[")
    while True:
        yield from source.skip_space()
        yield from _python_call(source, sink, functions)
        source.mark = source.pos
        if (yield from source.skip_space()) == "]":
            break
        yield from source.expect(",")
    source.pos += 1
    source.mark = None


def _python_lines(source: Source, sink: Sink, functions: Functions) -> Steps[None]:
    """Read at least one call, and those that follow it."""
    yield from _python_call(source, sink, functions)
    while True:
        yield from source.skip_space()
        source.mark = source.pos
        if (yield from source.run_of(NAME)) not in functions:
            source.mark = None
            return
        yield from _python_call(source, sink, functions)


def _python_call(source: Source, sink: Sink, functions: Functions) -> Steps[None]:
    name = yield from source.run_of(NAME)
    if name not in functions:
        raise MalformedError
    source.pos += len(name)
    yield from source.expect("(")
    yield from _python_arguments(source, sink, name)


def python_json(text: str) -> str | None:
    """Return the JSON of a Python literal; None if *text* is none."""
    source = Source()
    source.add(f"{text} ")  # a word ends before the end
    source.ended = True
    pieces: list[str] = []
    try:
        for _ in _python_value(source, pieces.append):
            raise AssertionError("no more text can come")
    except MalformedError:
        return None
    return None if source.rest().strip() else "".join(pieces)


def _python_arguments(source: Source, sink: Sink, name: str) -> Steps[None]:
    """Read keyword arguments and the bracket that closes them."""
    begun = False
    while (yield from source.skip_space()) != ")":
        keyword = yield from source.run_of(IDENTIFIER)
        if not keyword:
            raise MalformedError
        source.pos += len(keyword)
        yield from source.skip_space()
        yield from source.expect("=")
        if not begun:
            sink.begin(name)
        sink.arguments(f'{", " if begun else "{"}"{keyword}": ')
        begun = True
        yield from source.skip_space()
        yield from _python_value(source, sink.arguments)
        if (yield from source.skip_space()) != ")":
            yield from source.expect(",")
    source.pos += 1
    if not begun:
        sink.begin(name)
    sink.arguments("}" if begun else "{}")
    sink.end()


def _python_value(source: Source, out: Out, depth: int = 0) -> Steps[None]:
    first = yield from source.peek()
    if first in ('"', "'"):
        out('"')
        yield from _python_string(source, lambda text: out(output_json.escaped(text)))
        out('"')
    elif first in ("{", "[", "("):
        if depth == MAX_DEPTH:
            raise MalformedError
        yield from _python_nested(source, out, first, depth + 1)
    else:
        word = yield from source.run_of(WORD)
        if source.pos + len(word) == len(source.buffer) and source.is_over():
            source.pos += len(word)  # the start of some word: there is no saying of which
            raise MalformedError
        out(_python_word(word))
        source.pos += len(word)


def _python_word(word: str) -> str:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _JSON_WORD.fullmatch(word):
        return word
    if not _PYTHON_NUMBER.fullmatch(word):
        raise MalformedError
    whole = not set(word) & set(".eE")
    try:
        return json.dumps(int(word) if whole else float(word), allow_nan=False)
    except ValueError:  # an underscore too many, or more than JSON has numbers for
        raise MalformedError from None


def _python_nested(source: Source, out: Out, opening: str, depth: int) -> Steps[None]:
    """Read a dict, a list or a tuple."""
    closing = {"{": "}", "[": "]", "(": ")"}[opening]
    source.pos += 1
    out("{" if opening == "{" else "[")
    separator = ""
    while (yield from source.skip_space()) != closing:
        out(separator)
        if opening == "{":
            if (yield from source.peek()) not in ('"', "'"):
                raise MalformedError
            yield from _python_value(source, out, depth)
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            out(": ")
        yield from _python_value(source, out, depth)
        if (yield from source.skip_space()) != closing:
            yield from source.expect(",")
        separator = ", "
    source.pos += 1
    out("}" if opening == "{" else "]")


def _python_string(source: Source, out: Callable[[str], None]) -> Steps[None]:
    """Read a string in single or double quotes, one or three, and give what it says to *out*."""
    quote = yield from source.peek()
    source.pos += 1
    if (yield from source.peek()) == quote:
        source.pos += 1
        if (yield from source.peek()) != quote:
            return
        source.pos += 1
        quote *= 3
    while not (yield from _closes(source, quote)):
        character = source.buffer[source.pos]
        source.pos += 1
        if character == "\\":
            yield from _python_escape(source, out)
        else:
            out(character)
    source.pos += len(quote)


def _closes(source: Source, quote: str) -> Steps[bool]:
    """Tell whether a string ends here. A lone quote that nothing can follow so is part of it:

    LFM2's template writes ``'it's'``, and so does the model.
    """
    stands_here = yield from _at(source, quote)
    if not stands_here or len(quote) == 3:
        return stands_here
    length = 1
    while True:
        following = source.buffer[source.pos + length : source.pos + length + 1]
        if following and following not in SPACE:
            return following in ",)]}:"
        if following:
            length += 1
        elif source.is_over():
            return True
        else:
            yield


def _at(source: Source, literal: str) -> Steps[bool]:
    """Tell whether *literal* stands here; MalformedError if the text ends before it can."""
    while True:
        text = source.buffer[source.pos : source.pos + len(literal)]
        if text == literal:
            return True
        if text and not literal.startswith(text):
            return False
        if source.is_over():
            source.pos = len(source.buffer)  # the start of something that is cut
            raise MalformedError
        yield


def _python_escape(source: Source, out: Callable[[str], None]) -> Steps[None]:
    """Read what follows a backslash."""
    character = yield from source.peek()
    if not character:
        raise MalformedError
    source.pos += 1
    if character in _CODES:
        digits = ""
        while len(digits) < _CODES[character] and (digit := (yield from source.peek())) in _HEX:
            source.pos += 1
            digits += digit
        code = int(digits, 16) if len(digits) == _CODES[character] else -1
        is_character = 0 <= code < 0x110000 and not 0xD800 <= code < 0xE000
        out(chr(code) if is_character else f"\\{character}{digits}")
    elif character in _ESCAPES:
        out(_ESCAPES[character])
    elif character in "\\'\"":
        out(character)
    elif character != "\n":  # a line that is continued
        out(f"\\{character}")


# -------------------------------------------------------------------------------- Gemma


class GemmaMarks(NamedTuple):
    """How a generation of Gemma writes calls: the texts around a call and around a string."""

    opening: str
    closing: str
    quote: str


FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')


def gemma(marks: GemmaMarks) -> Reader:
    """Return the format ``OPENINGcall:name{key:QUOTEtextQUOTE,n:5}CLOSING``, among content."""

    def read(source: Source, sink: Sink, functions: Functions, start: str) -> Steps[None]:
        yield from source.skip_space()
        yield from source.expect("call:")
        name = yield from source.run_of(NAME)
        source.pos += len(name)
        if not name or (yield from source.skip_space()) != "{":
            raise MalformedError
        sink.begin(name)
        yield from _gemma_value(source, sink.arguments, marks.quote)
        sink.end()

    return among((marks.opening,), read, marks.closing)


def _gemma_value(source: Source, out: Out, quote: str, depth: int = 0) -> Steps[None]:
    if (yield from source.optional(quote)):
        yield from _gemma_string(source, out, quote)
        return
    first = yield from source.peek()
    if first == '"':
        yield from output_json.string(source, out)
    elif first in ("{", "["):
        if depth == MAX_DEPTH:
            raise MalformedError
        yield from _gemma_nested(source, out, quote, first, depth + 1)
    else:
        word = (yield from _gemma_bare(source, ",]}")).strip()
        if not word:
            raise MalformedError
        out(word if _JSON_WORD.fullmatch(word) else f'"{output_json.escaped(word)}"')


def _gemma_nested(source: Source, out: Out, quote: str, opening: str, depth: int) -> Steps[None]:
    closing = "}" if opening == "{" else "]"
    source.pos += 1
    out(opening)
    separator = ""
    while (yield from source.skip_space()) != closing:
        out(separator)
        if opening == "{":
            if (yield from source.optional(quote)):
                yield from _gemma_string(source, out, quote)
            else:
                key = (yield from _gemma_bare(source, ":,]}")).strip().strip('"')
                out(f'"{output_json.escaped(key)}"')
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            out(": ")
        yield from _gemma_value(source, out, quote, depth)
        if (yield from source.skip_space()) != closing:
            yield from source.expect(",")
        separator = ", "
    source.pos += 1
    out(closing)


def _gemma_string(source: Source, out: Out, quote: str) -> Steps[None]:
    """Read a string whose opening quote has been read."""
    out('"')
    while not (yield from _at(source, quote)):
        out(output_json.escaped(source.buffer[source.pos]))
        source.pos += 1
    source.pos += len(quote)
    out('"')


def _gemma_bare(source: Source, stops: str) -> Steps[str]:
    """Read text up to one of *stops*; MalformedError if none comes."""
    length = 0
    while True:
        rest = source.buffer[source.pos :]
        while length < len(rest) and rest[length] not in stops:
            length += 1
        if length < len(rest):
            source.pos += length
            return rest[:length]
        if source.is_over():
            source.pos = len(source.buffer)  # the start of something that is cut
            raise MalformedError
        yield
