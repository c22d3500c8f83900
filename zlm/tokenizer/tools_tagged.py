"""Formats of tool calls with a tag around each parameter: Qwen3-Coder's and its like, GLM's.

Coroutines as those of ``tools_json``. A parameter's text is turned into JSON by the function's
schema: strings as they arrive, all else when it is complete.
"""

import json
from typing import NamedTuple

from zlm.tokenizer import output_json
from zlm.tokenizer.output_source import (
    NAME,
    MalformedError,
    Reader,
    Sink,
    Source,
    Steps,
    among,
    verbatim,
)
from zlm.tokenizer.tools_schemas import STRING, Functions, Kinds
from zlm.tokenizer.tools_values import written_json

_MOST_KEY = 256  # characters of a parameter's name


class TagMarks(NamedTuple):
    """The texts around calls, a call, and a parameter.

    attributes: names stand in quotes.  trims: a line break at either end of a value is not part of
    it.
    """

    opening: str
    closing: str
    call: str
    call_end: str
    parameter: str
    parameter_end: str
    attributes: bool = False
    trims: bool = False


QWEN3_CODER = TagMarks(
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    trims=True,
)  # fmt: skip
SEED_OSS = TagMarks(
    "<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>", "<parameter=",
    "</parameter>",
)  # fmt: skip
MINIMAX_M2 = TagMarks(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>",
    '<parameter name="', "</parameter>", True,
)  # fmt: skip
DEEPSEEK_V32 = TagMarks(
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>", '<｜DSML｜parameter name="', "</｜DSML｜parameter>", True,
)  # fmt: skip


class _Fields:
    """The JSON of a call's arguments, field by field. The call begins with the first of them."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._begun = False

    def key(self, key: str) -> None:
        if not self._begun:
            self._sink.begin(self._name)
        start = ", " if self._begun else "{"
        self._sink.arguments(f"{start}{json.dumps(key, ensure_ascii=False)}: ")
        self._begun = True

    def close(self) -> None:
        if not self._begun:
            self._sink.begin(self._name)
        self._sink.arguments("}" if self._begun else "{}")
        self._sink.end()


def tagged(marks: TagMarks) -> Reader:
    """Return the format ``CALLname>PARAMETERkey>text PARAMETER_END CALL_END``, among content.

    A call of a known function is seen without the text that should stand before it: models leave
    that out.
    """

    def read(source: Source, sink: Sink, functions: Functions, start: str) -> Steps[None]:
        if start == marks.opening:
            yield from source.skip_space()
            yield from source.expect(marks.call)
        yield from _call(source, sink, functions, marks, bare=start == marks.call)
        yield from _more_calls(source, sink, functions, marks)

    return among((marks.opening, marks.call), read, marks.closing)


def _more_calls(source: Source, sink: Sink, functions: Functions, marks: TagMarks) -> Steps[None]:
    """Read the calls that follow one, and the white space after each."""
    while True:
        yield from source.skip_space()
        source.mark = source.pos
        if not (yield from source.optional(marks.call)):
            source.mark = None
            return
        yield from _call(source, sink, functions, marks, bare=False)


def _call(
    source: Source, sink: Sink, functions: Functions, marks: TagMarks, *, bare: bool
) -> Steps[None]:
    """Read a call, whose first text was read. *bare*: only one of a known function is one."""
    name = yield from source.run_of(NAME)
    if not name or (bare and name not in functions):
        raise MalformedError
    source.pos += len(name)
    yield from source.expect('">' if marks.attributes else ">")
    fields = _Fields(sink, name)
    while True:
        yield from source.skip_space()
        if (yield from source.one_of((marks.call_end, marks.parameter))) == marks.call_end:
            fields.close()
            return
        key, is_string = yield from _parameter_name(source, marks)
        kinds = functions.kinds(name, key)
        if is_string is not None:
            kinds = STRING if is_string else kinds - STRING
        fields.key(key)
        end = marks.parameter_end
        if marks.trims:
            yield from source.optional("\n")
        yield from _value(source, sink, kinds, (f"\n{end}", end) if marks.trims else (end,))


def _parameter_name(source: Source, marks: TagMarks) -> Steps[tuple[str, bool | None]]:
    """Read the rest of a parameter's tag: its name, and what ``string="true"`` says, if it does."""
    key = yield from _up_to(source, '"' if marks.attributes else ">")
    if not marks.attributes:
        return key, None
    attributes = yield from _up_to(source, ">")
    if 'string="' not in attributes:
        return key, None
    return key, 'string="true"' in attributes


def _up_to(source: Source, end: str) -> Steps[str]:
    """Read a short text of one line up to the character *end*, and that."""
    length = 0
    while True:
        rest = source.rest()
        while length < len(rest):
            if rest[length] == end:
                source.pos += length + 1
                return rest[:length]
            if rest[length] in "\n<" or length == _MOST_KEY:
                raise MalformedError
            length += 1
        if source.is_over():
            source.pos = len(source.buffer)
            raise MalformedError
        yield


def _value(source: Source, sink: Sink, kinds: Kinds, ends: tuple[str, ...]) -> Steps[None]:
    if kinds == STRING:
        sink.arguments('"')
        yield from verbatim(source, ends, lambda text: sink.arguments(output_json.escaped(text)))
        sink.arguments('"')
        return
    pieces: list[str] = []
    yield from verbatim(source, ends, pieces.append)
    sink.arguments(written_json("".join(pieces), kinds))


def _glm_call(source: Source, sink: Sink, functions: Functions, start: str) -> Steps[None]:
    """``<tool_call>name <arg_key>key</arg_key> <arg_value>text</arg_value> ... </tool_call>``."""
    yield from source.skip_space()
    name = yield from source.run_of(NAME)
    if not name:
        raise MalformedError
    source.pos += len(name)
    fields = _Fields(sink, name)
    while True:
        yield from source.skip_space()
        if (yield from source.one_of(("</tool_call>", "<arg_key>"))) == "</tool_call>":
            fields.close()
            return
        key = yield from _up_to(source, "<")
        yield from source.one_of(("/arg_key>",))
        yield from source.skip_space()
        yield from source.one_of(("<arg_value>",))
        fields.key(key.strip())
        kinds = functions.kinds(name, key.strip())
        yield from _value(source, sink, kinds, ("</arg_value>",))


glm = among(("<tool_call>",), _glm_call)
