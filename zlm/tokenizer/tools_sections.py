"""Formats of tool calls in sections of special tokens: DeepSeek's and Kimi's.

Coroutines as those of ``tools_json``: a section of calls, each a head, a separator and JSON.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from zlm.tokenizer import output_json
from zlm.tokenizer.output_source import (
    MalformedError,
    Reader,
    Sink,
    Source,
    Steps,
    among,
    verbatim,
)
from zlm.tokenizer.tools_schemas import Functions

_KIMI_ID = re.compile(r"(?:functions\.)?([A-Za-z0-9_.:/-]+?)(?::[0-9]+)?")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")

# Reads what stands between a separator and the arguments, given what stood before the separator;
# returns the function's name and the call's id.
Head = Callable[[Source, str], Steps[tuple[str, str | None]]]


class SectionMarks(NamedTuple):
    """The texts around a section, around a call, and between its head and its arguments."""

    section: str
    section_end: str
    call: str
    call_end: str
    separator: str


DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
KIMI_K2 = SectionMarks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip


def sections(marks: SectionMarks, head: Head) -> Reader:
    """Return the format ``SECTION CALL head SEPARATOR {...} CALL_END ... SECTION_END``."""

    def read(source: Source, sink: Sink, functions: Functions, start: str) -> Steps[None]:
        if start == marks.section:
            yield from source.skip_space()
            yield from source.expect(marks.call)
        yield from _call(source, sink, marks, head)
        while (yield from _begins(source, marks.call)):
            yield from _call(source, sink, marks, head)

    return among((marks.section, marks.call), read, marks.section_end)


def _begins(source: Source, literal: str) -> Steps[bool]:
    """Skip white space and read *literal*, marked, if it stands there."""
    yield from source.skip_space()
    source.mark = source.pos
    if (yield from source.optional(literal)):
        return True
    source.mark = None
    return False


def _call(source: Source, sink: Sink, marks: SectionMarks, head: Head) -> Steps[None]:
    before: list[str] = []
    yield from verbatim(source, (marks.separator,), before.append)
    name, call_id = yield from head(source, "".join(before).strip())
    if not _NAME.fullmatch(name) or (yield from source.skip_space()) != "{":
        raise MalformedError
    sink.begin(name, call_id)
    yield from output_json.value(source, sink.arguments)
    sink.end()
    yield from source.skip_space()
    if (yield from source.optional("```", cut=True)):
        yield from source.skip_space()
    yield from source.optional(marks.call_end, cut=True)


def deepseek_head(source: Source, before: str) -> Steps[tuple[str, str | None]]:
    """``function<sep>name`` and a fenced block (V3, R1), or ``name<sep>`` (V3.1)."""
    if (yield from source.skip_space()) == "{":
        return before, None
    name: list[str] = []
    yield from verbatim(source, ("\n",), name.append)
    yield from source.skip_space()
    yield from source.optional("```json")
    return "".join(name).strip(), None


def kimi_head(source: Source, before: str) -> Steps[tuple[str, str | None]]:
    """``functions.name:0<sep>``: that is the call's id, by which its result is named later."""
    yield from ()  # no more text is needed
    named = _KIMI_ID.fullmatch(before)
    if named is None:
        raise MalformedError
    return named[1], before
