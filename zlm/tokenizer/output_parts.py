"""The parts of one choice's answer: what a parser finds, gathered for the next delta.

Owns the parser, the ids of calls, and what has been found and not taken yet.
"""

import secrets
import string

from zlm.messages import ToolCallDelta
from zlm.tokenizer.output_parser import OutputParser
from zlm.tokenizer.output_source import CallArguments, CallBegin, Content, Event, Reasoning

_LETTERS = string.ascii_letters + string.digits


class OutputParts:
    """Gathers the events of one choice. Text in, content out; the rest waits for ``take``."""

    __slots__ = (
        "_calls",
        "_drops_reasoning",
        "_named",
        "_nine_letter_ids",
        "_num_calls",
        "_parser",
        "_reasoning",
    )

    def __init__(
        self,
        parser: OutputParser,
        *,
        named: bool = False,
        nine_letter_ids: bool = False,
        drops_reasoning: bool = False,
    ) -> None:
        """*named*: the client named the function to be called."""
        self._parser = parser
        self._named = named
        self._nine_letter_ids = nine_letter_ids
        self._drops_reasoning = drops_reasoning
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0

    @property
    def enough(self) -> bool:
        """Whether the calls that are wanted are complete: the answer is to end here."""
        return self._parser.enough

    @property
    def passes_on(self) -> bool:
        """Whether all further text is content."""
        return self._parser.passes_on

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._reasoning or self._calls)

    def push(self, text: str) -> str:
        """Take new *text*; return the content that is certain now."""
        return self._sort(self._parser.push(text))

    def flush(self, reason: str) -> str:
        """The text is over for *reason*: return what is left of the content."""
        return self._sort(self._parser.flush(cut=reason == "length"))

    def take(self) -> tuple[str, list[ToolCallDelta]]:
        """Return the reasoning and the pieces of calls found since the last time."""
        reasoning, self._reasoning = "".join(self._reasoning), []
        calls, self._calls = self._calls, []
        return reasoning, joined_calls(calls)

    def finish_reason(self, reason: str) -> str:
        """Return why an answer that ends by *reason* ended, seen from outside.

        Calls, all complete, are ``tool_calls``; one that the client named is ``stop``, as OpenAI
        has it. What the limit cut is always ``length``.
        """
        complete = 0 < self._num_calls == self._parser.completed_calls
        return "tool_calls" if reason == "stop" and complete and not self._named else reason

    def _sort(self, events: list[Event]) -> str:
        content = []
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text) if not self._drops_reasoning:
                    self._reasoning.append(text)
                case CallBegin(name, own):
                    call_id = self._call_id(own)
                    self._calls.append(ToolCallDelta(self._num_calls, id=call_id, name=name))
                    self._num_calls += 1
                case CallArguments(text):
                    self._calls.append(ToolCallDelta(self._num_calls - 1, text))
        return "".join(content)

    def _call_id(self, own: str | None) -> str:
        """Return a new id, or the model's *own*, which its template wants to see again."""
        if own is not None:
            return own
        if self._nine_letter_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def joined_calls(pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return *pieces* with those of each call made one."""
    result: list[ToolCallDelta] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if result and result[-1].index == piece.index:
            arguments[-1].append(piece.arguments)
        else:
            result.append(piece)
            arguments.append([piece.arguments])
    return [
        ToolCallDelta(call.index, "".join(texts), call.id, call.name)
        for call, texts in zip(result, arguments, strict=True)
    ]
