"""Reads JSON from a ``Source`` as it arrives, and passes it on in pieces that are valid JSON.

Strict in structure. What models get wrong inside strings is mended, since no client could read it:
a line break or another control character is escaped, and so is a backslash that escapes nothing.
MalformedError leaves the source at the first character that was not passed on.
"""

import json
import re
from collections.abc import Callable

from zlm.tokenizer.output_source import IDENTIFIER, MalformedError, Source, Steps

MAX_DEPTH = 100  # of nested values

WORD = IDENTIFIER | frozenset("+-.")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_CONSTANTS = ("true", "false", "null")

Out = Callable[[str], None]


def value(source: Source, out: Out, depth: int = 0) -> Steps[None]:
    """Read one value and give its text to *out*."""
    first = yield from source.peek()
    if first == '"':
        yield from string(source, out)
    elif first in ("{", "["):
        if depth == MAX_DEPTH:
            raise MalformedError
        yield from _nested(source, out, first, depth + 1)
    else:
        word = yield from source.run_of(WORD)
        if source.pos + len(word) == len(source.buffer) and source.is_over():
            _cut(source, out, word)
        if word not in _CONSTANTS and not _NUMBER.fullmatch(word):
            raise MalformedError
        source.pos += len(word)
        out(word)


def _cut(source: Source, out: Out, text: str) -> None:
    """The text ends with *text*, which is the start of something: pass it on all the same."""
    source.pos = len(source.buffer)
    out(text)
    raise MalformedError


def _nested(source: Source, out: Out, opening: str, depth: int) -> Steps[None]:
    """Read an object or a list."""
    closing = "}" if opening == "{" else "]"
    source.pos += 1
    out(opening)
    if (yield from _space(source, out)) == closing:
        source.pos += 1
        out(closing)
        return
    while True:
        if opening == "{":
            yield from string(source, out)
            yield from _space(source, out)
            yield from _exactly(source, out, ":")
            yield from _space(source, out)
        yield from value(source, out, depth)
        if (yield from _space(source, out)) == closing:
            source.pos += 1
            out(closing)
            return
        yield from _exactly(source, out, ",")
        yield from _space(source, out)


def _space(source: Source, out: Out) -> Steps[str]:
    """Pass white space on; return the character after it."""
    while True:
        character = yield from source.peek()
        if not character or character not in " \t\r\n":
            return character
        source.pos += 1
        out(character)


def _exactly(source: Source, out: Out, wanted: str) -> Steps[None]:
    yield from source.expect(wanted)
    out(wanted)


def string(source: Source, out: Out) -> Steps[None]:
    """Read one string in double quotes and give its JSON to *out*."""
    yield from _exactly(source, out, '"')
    while True:
        character = yield from source.peek()
        if not character:
            raise MalformedError
        plain = _PLAIN.match(source.buffer, source.pos)
        if plain is not None:
            source.pos = plain.end()
            out(plain[0])
            continue
        source.pos += 1
        if character == '"':
            out('"')
            return
        if character == "\\":
            yield from _escape(source, out)
        else:
            out(escaped(character))


def _escape(source: Source, out: Out) -> Steps[None]:
    """Pass on what follows a backslash that has been read, with it."""
    character = yield from source.peek()
    if character == "u":
        source.pos += 1
        digits = ""
        while len(digits) < 4 and (digit := (yield from source.peek())) and digit in _HEX:
            source.pos += 1
            digits += digit
        if not digit:
            _cut(source, out, f"\\u{digits}")
        # Without its four digits it is no escape, so the backslash stands for itself.
        out(f"\\u{digits}" if len(digits) == 4 else f"\\\\u{digits}")
    elif not character:
        _cut(source, out, "\\")
    elif character in _ESCAPES:
        source.pos += 1
        out(f"\\{character}")
    elif character == "'":
        source.pos += 1
        out("'")
    else:
        out("\\\\")


def escaped(text: str) -> str:
    """Return *text* as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded_string(source: Source) -> Steps[str]:
    """Read one string and return what it says; MalformedError if that is no valid text."""
    pieces: list[str] = []
    yield from string(source, pieces.append)
    decoded: str = json.loads("".join(pieces))
    if any("\ud800" <= character <= "\udfff" for character in decoded):
        raise MalformedError
    return decoded
