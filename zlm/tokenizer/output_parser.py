"""Splits the text of one choice into reasoning, content and tool calls, as it arrives.

Pure: text in, events out; any chunking of the same text gives the same events, but for how often
they come (``joined`` makes them equal). A format is a coroutine (see ``output_source``); the one
that reads reasoning runs first, then that of tool calls.

Owns nothing but what is not decided yet.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from zlm.tokenizer.output_source import (
    CallArguments,
    Content,
    EnoughError,
    Event,
    Reasoning,
    Sink,
    Source,
    Steps,
    until,
)
from zlm.tokenizer.tools_json import (
    bare_json,
    forced_arguments,
    forced_list,
    hermes,
    llama3,
    mistral,
)
from zlm.tokenizer.tools_written import FUNCTION_GEMMA, GEMMA4, gemma, pythonic

ToolSteps = Callable[[Source, Sink, frozenset[str]], Steps[None]]


class ToolFormat(NamedTuple):
    """A format of tool calls. ``markers``: texts it needs, though they may be special tokens."""

    read: ToolSteps
    markers: tuple[str, ...] = ()
    nine_letter_ids: bool = False  # the template takes no other ids of calls


class ReasoningFormat(NamedTuple):
    """Thoughts between two texts. ``assumed``: the text begins within, opened or not."""

    opening: str
    closing: str
    assumed: bool = False


TOOL_FORMATS = {
    "hermes": ToolFormat(hermes, ("<tool_call>", "</tool_call>")),
    "mistral": ToolFormat(mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), nine_letter_ids=True),
    "llama3_json": ToolFormat(llama3, ("<|python_tag|>",)),
    "pythonic": ToolFormat(pythonic, ("<|python_start|>", "<|python_end|>")),
    "functiongemma": ToolFormat(gemma(FUNCTION_GEMMA), tuple(FUNCTION_GEMMA)),
    "gemma4": ToolFormat(gemma(GEMMA4), tuple(GEMMA4)),
    "json": ToolFormat(bare_json),
}
REQUIRED = ToolFormat(forced_list)  # what the grammar of tool_choice required allows
NAMED = ToolFormat(forced_arguments)  # the same of a tool_choice that names a function

REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", assumed=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
}


class OutputParser:
    """One choice's parser: ``push`` text, then ``flush``; both return the events found."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        *,
        known: Iterable[str] = (),
        in_reasoning: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """*known*: names of the functions that may be called.

        *in_reasoning*: the prompt has opened the thoughts. *most_calls*: nothing is read after so
        many calls.
        """
        self._source = Source()
        self._sink = Sink(self._source, most_calls=most_calls)
        self.enough = False  # the calls that are wanted are complete; what follows is dropped
        self._steps: Steps[None] | None = _read(
            self._source, self._sink, reasoning, in_reasoning, tools, frozenset(known)
        )
        self._advance()

    @property
    def passes_on(self) -> bool:
        """Whether everything from now on is content."""
        return self._steps is None and not self.enough

    @property
    def completed_calls(self) -> int:
        return self._sink.completed

    def push(self, text: str) -> list[Event]:
        """Take the next *text*."""
        if self.enough:
            return []
        if self._steps is None:
            return [Content(text)] if text else []
        self._source.add(text)
        return self._advance()

    def flush(self) -> list[Event]:
        """The text is over."""
        self._source.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
                self._sink.content(self._source.rest())
            except EnoughError:
                self._steps = None
                self.enough = True
        events, self._sink.events = self._sink.events, []
        return events


def _read(
    source: Source,
    sink: Sink,
    reasoning: ReasoningFormat | None,
    in_reasoning: bool,
    tools: ToolFormat | None,
    known: frozenset[str],
) -> Steps[None]:
    if reasoning is not None:
        yield from _thoughts(source, sink, reasoning, in_reasoning)
    if tools is not None:
        yield from tools.read(source, sink, known)


def _thoughts(
    source: Source, sink: Sink, reasoning: ReasoningFormat, in_reasoning: bool
) -> Steps[None]:
    """Read the thoughts, if the text begins with them, and the white space around them."""
    source.mark = source.pos
    yield from source.skip_space()
    opened = yield from source.optional(reasoning.opening)
    if not (opened or in_reasoning or reasoning.assumed):
        source.pos = source.mark
        source.mark = None
        return
    source.mark = None
    yield from source.skip_space()
    if (yield from until(source, (reasoning.closing,), sink.reasoning)) is not None:
        source.mark = None
        yield from source.skip_space()


def joined(events: Iterable[Event]) -> list[Event]:
    """Return *events* with neighbours of one kind made one: how the text was cut is gone."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case Content(a), Content(b):
                result[-1] = Content(a + b)
            case Reasoning(a), Reasoning(b):
                result[-1] = Reasoning(a + b)
            case CallArguments(a), CallArguments(b):
                result[-1] = CallArguments(a + b)
            case _:
                result.append(event)
    return result
