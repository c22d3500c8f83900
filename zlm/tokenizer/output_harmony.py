"""Reads harmony, the format of gpt-oss: an answer is a row of messages, each with a channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends in ``<|start|>assistant``. Analysis is reasoning; commentary to a function is a
call of it, which ends the turn, and to nobody it is content, as all of final is. What stands
outside of any message is content too: a final message that is continued, say.
"""

import re

from zlm.tokenizer import output_json
from zlm.tokenizer.output_source import (
    EnoughError,
    MalformedError,
    Reader,
    Sink,
    Source,
    Steps,
    drop,
    until,
    verbatim,
)
from zlm.tokenizer.tools_schemas import Functions

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_HEAD = (START, CHANNEL, " to=", "to=")  # what the head of a message begins with
_ENDS = (END, CALL, RETURN, START, CHANNEL)  # what the text of one ends with
_TO = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


def harmony(*, reasons: bool, calls: bool) -> Reader:
    """Return the format. *reasons*: analysis is told apart from content. *calls*: so are calls."""

    def read(source: Source, sink: Sink, functions: Functions) -> Steps[None]:
        told = {"reasoning": False, "content": False}  # whether there was a message of the kind
        while (yield from source.peek()):
            head = yield from _head(source)
            recipient = _TO.search(head)
            to = recipient[1] if recipient is not None else ""
            if calls and to.startswith("functions."):
                name = to.removeprefix("functions.")
                if (yield from _call(source, sink, name)):
                    continue
            channel = _CHANNEL.search(head)
            thinks = channel is not None and channel[1] == "analysis"
            # What is said to a tool of the model's own, such as python, is a thought as well.
            thinks = thinks or (bool(to) and not to.startswith("functions."))
            yield from _text(source, sink, told, thoughts=reasons and thinks)

    return read


def _head(source: Source) -> Steps[str]:
    """Read a message's head; empty if its text stands here without one, or if it is cut."""
    for first in _HEAD:
        if (yield from source.optional(first)):
            pieces = [first]
            break
    else:
        return ""
    try:
        yield from verbatim(source, (MESSAGE,), pieces.append)
    except MalformedError:
        return ""
    return "".join(pieces)


def _text(source: Source, sink: Sink, told: dict[str, bool], *, thoughts: bool) -> Steps[None]:
    """Read a text up to its end. Texts of one kind are told with a line break between them."""
    kind, emit = ("reasoning", sink.reasoning) if thoughts else ("content", sink.content)
    separator = "\n" if told[kind] else ""

    def tell(text: str) -> None:
        nonlocal separator
        if text:
            emit(separator + text)
            separator, told[kind] = "", True

    yield from _end(source, (yield from until(source, _ENDS, tell)))


def _call(source: Source, sink: Sink, name: str) -> Steps[bool]:
    """Read the arguments of a call and its end, which is that of the turn if the model says so.

    False if what is left here to read is no JSON, but text.
    """
    source.mark = source.pos
    if (yield from source.skip_space()) != "{":
        source.pos, source.mark = source.mark, None
        return False
    sink.begin(name)
    try:
        yield from output_json.value(source, sink.arguments)
    except MalformedError:
        sink.broken()
        return False
    sink.end()
    marker = yield from until(source, _ENDS, drop)
    yield from _end(source, marker)
    if marker == CALL:
        raise EnoughError
    return True


def _end(source: Source, marker: str | None) -> Steps[None]:
    """Go on behind *marker*, which was read; one that begins a head is read again."""
    yield from ()
    source.mark = None
    if marker in (START, CHANNEL):
        source.pos -= len(marker)
