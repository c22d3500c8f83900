"""Splits the text of one choice into reasoning, content and tool calls, as it arrives.

Pure: text in, events out; any chunking of the same text gives the same events, but for how often
they come. A format is a coroutine (see ``output_source``); the one that reads reasoning runs first,
then that of tool calls. ``output_known`` lists the formats.

Owns nothing but what is not decided yet.
"""

from zlm.tokenizer.output_harmony import harmony
from zlm.tokenizer.output_known import ReasoningFormat, ToolFormat
from zlm.tokenizer.output_source import (
    Content,
    EnoughError,
    Event,
    Sink,
    Source,
    Steps,
    until,
)
from zlm.tokenizer.tools_schemas import Functions


class OutputParser:
    """One choice's parser: ``push`` text, then ``flush``; both return the events found."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        *,
        functions: Functions | None = None,
        in_reasoning: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """*functions*: those that may be called.

        *in_reasoning*: the prompt has opened the thoughts. *most_calls*: nothing is read after so
        many calls.
        """
        self._source = Source()
        self._sink = Sink(self._source, most_calls=most_calls)
        self.enough = False  # the calls that are wanted are complete; what follows is dropped
        self._steps: Steps[None] | None = _read(
            self._source, self._sink, reasoning, in_reasoning, tools, functions or Functions()
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

    def flush(self, *, cut: bool = False) -> list[Event]:
        """The text is over; *cut*: at a limit, so that a call's beginning is no content."""
        self._source.ended = True
        self._source.cut = cut
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
    functions: Functions,
) -> Steps[None]:
    if any(each is not None and each.channels for each in (reasoning, tools)):
        read = harmony(reasons=reasoning is not None, calls=tools is not None)
        yield from read(source, sink, functions)
        return
    if reasoning is not None:
        ends = () if tools is None else tools.ends_thoughts
        yield from _thoughts(source, sink, reasoning, in_reasoning, ends)
    if tools is not None:
        yield from tools.read(source, sink, functions)


def _thoughts(
    source: Source,
    sink: Sink,
    reasoning: ReasoningFormat,
    in_reasoning: bool,
    ends: tuple[str, ...],
) -> Steps[None]:
    """Read the thoughts, if the text begins with them, and the white space around them.

    *ends*: texts that end them as well, and are read again.
    """
    source.mark = source.pos
    yield from source.skip_space()
    opened = yield from source.optional(reasoning.opening)
    if not (opened or in_reasoning or reasoning.assumed):
        source.pos = source.mark
        source.mark = None
        return
    source.mark = None
    yield from source.skip_space()
    found = yield from until(source, (reasoning.closing, *ends), sink.reasoning)
    source.mark = None
    if found == reasoning.closing:
        yield from source.skip_space()
    elif found is not None:
        source.pos -= len(found)
