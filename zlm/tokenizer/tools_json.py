"""Formats of tool calls that are JSON: Hermes and its like, Mistral, Llama 3, bare and forced ones.

Each is a coroutine that reads one choice's whole text (see ``output_source``). All share one way
to read a call: an object with ``name`` and ``arguments`` (or ``parameters``), in any order.
"""

import json

from zlm.tokenizer import output_json
from zlm.tokenizer.output_source import (
    NAME,
    MalformedError,
    Reader,
    Sink,
    Source,
    Steps,
    among,
    drop,
    until,
)
from zlm.tokenizer.tools_schemas import Functions

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")


def marked(opening: str, closing: str) -> Reader:
    """Return the format ``OPENING{"name": ..., "arguments": {...}}CLOSING``, among content.

    One object or a list of them; objects may follow one another.
    """

    return among((opening,), lambda source, sink, *_: _calls(source, sink), closing)


def _mistral_calls(source: Source, sink: Sink, known: Functions, start: str) -> Steps[None]:
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`` or ``[TOOL_CALLS]name[ARGS]{}``."""
    first = yield from source.skip_space()
    if first == "[":
        yield from call_list(source, sink)
    elif first == "{":
        yield from call(source, sink)
    else:
        yield from _named_call(source, sink)


def _named_call(source: Source, sink: Sink) -> Steps[None]:
    name = yield from source.run_of(NAME)
    source.pos += len(name)
    if (yield from source.optional("[CALL_ID]")):
        call_id = yield from source.run_of(NAME)
        source.pos += len(call_id)
    yield from source.optional("[ARGS]")
    first = yield from source.skip_space()
    if not name or first != "{":
        raise MalformedError
    sink.begin(name)
    yield from output_json.value(source, sink.arguments)
    sink.end()


mistral = among(("[TOOL_CALLS]",), _mistral_calls)


def llama3(source: Source, sink: Sink, known: Functions) -> Steps[None]:
    """``{"name": ..., "parameters": {...}}`` at the start or behind ``<|python_tag|>``."""
    yield from _bare(source, sink, known, "<|python_tag|>", "")


def bare_json(source: Source, sink: Sink, known: Functions) -> Steps[None]:
    """A call or a list of calls as JSON, at the start of the text or in a fenced block."""
    yield from _bare(source, sink, known, "```json", "```")


def _bare(source: Source, sink: Sink, known: Functions, opening: str, closing: str) -> Steps[None]:
    """Calls of *known* functions alone: other JSON is an answer like any other."""
    source.mark = source.pos
    yield from source.skip_space()
    fenced = yield from source.optional(opening)
    while True:
        try:
            yield from _calls(source, sink, known)
            if fenced and closing:
                yield from source.skip_space()
                yield from source.optional(closing, cut=True)
            yield from source.skip_space()
        except MalformedError:
            sink.broken()
        fenced = (yield from until(source, (opening,), sink.content)) is not None
        if not fenced:
            return


def _calls(source: Source, sink: Sink, known: Functions | None = None) -> Steps[None]:
    """Read a list of calls, or calls in a row; *known*: as of ``call``."""
    if (yield from source.skip_space()) == "[":
        yield from call_list(source, sink, known)
    else:
        yield from _calls_in_a_row(source, sink, known)


def _calls_in_a_row(source: Source, sink: Sink, known: Functions | None) -> Steps[None]:
    """Read calls with nothing, a comma or a semicolon between them."""
    yield from call(source, sink, known)
    while True:
        source.mark = source.pos
        separator = yield from source.skip_space()
        if separator in (";", ","):
            source.pos += 1
            yield from source.skip_space()
        following = yield from source.peek()
        if following != "{":
            if following and separator != following:
                sink.broken()  # the separator is content, then
            source.mark = None
            return
        yield from call(source, sink, known)


def forced_list(source: Source, sink: Sink, known: Functions) -> Steps[None]:
    """The text is a list of calls: what a grammar makes of tool_choice required.

    Of a call that the text's end cuts before its arguments there is nothing to tell.
    """
    source.mark = source.pos
    try:
        yield from source.skip_space()
        yield from call_list(source, sink)
    except MalformedError:
        if (yield from source.peek()):
            sink.broken()


def forced_arguments(source: Source, sink: Sink, known: Functions) -> Steps[None]:
    """The text is the arguments of the one function in *known*: a tool_choice that names it."""
    (name,) = known.names
    source.mark = source.pos
    try:
        if (yield from source.skip_space()) != "{":
            raise MalformedError
        sink.begin(name)
        yield from output_json.value(source, sink.arguments)
        sink.end()
    except MalformedError:
        sink.broken()


def call_list(source: Source, sink: Sink, known: Functions | None = None) -> Steps[None]:
    """Read a JSON list of at least one call."""
    yield from source.expect("[")
    yield from source.skip_space()
    while True:
        yield from call(source, sink, known)
        source.mark = source.pos
        if (yield from source.skip_space()) == "]":
            break
        yield from source.expect(",")
        yield from source.skip_space()
    source.pos += 1
    source.mark = None


def call(source: Source, sink: Sink, known: Functions | None = None) -> Steps[None]:
    """Read one call; *known*: only of these functions, any other is malformed.

    Its arguments are streamed when its name comes first. It is complete when they are: what is
    wrong with the object behind them is left in the text.
    """
    name: str | None = None
    arguments: str | None = None
    yield from source.expect("{")
    while True:
        yield from source.skip_space()
        key = yield from output_json.decoded_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        first = yield from source.skip_space()
        if key in NAMES and name is None:
            name = yield from _function_name(source, known)
        elif key in ARGUMENTS and arguments is None:
            if name is not None and first == "{":
                sink.begin(name)
                yield from output_json.value(source, sink.arguments)
                sink.end()
                yield from _rest_of_object(source)
                return
            arguments = yield from _whole_arguments(source, first)
        else:
            yield from output_json.value(source, drop)
        if (yield from source.skip_space()) == "}":
            break
        yield from source.expect(",")
    if name is None:
        raise MalformedError
    source.pos += 1
    sink.begin(name)
    sink.arguments(arguments or "{}")
    sink.end()


def _function_name(source: Source, known: Functions | None) -> Steps[str]:
    name = yield from output_json.decoded_string(source)
    if not name or (known is not None and name not in known):
        raise MalformedError
    return name


def _whole_arguments(source: Source, first: str) -> Steps[str]:
    """Return the JSON of arguments that are an object, the JSON of one in a string, or null."""
    if first == '"':
        text = yield from output_json.decoded_string(source)
    else:
        pieces: list[str] = []
        yield from output_json.value(source, pieces.append)
        text = "".join(pieces)
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedError from None
    if decoded is None:
        return "{}"
    if not isinstance(decoded, dict):
        raise MalformedError
    return text


def _rest_of_object(source: Source) -> Steps[None]:
    """Read what follows the arguments, as far as it is an object's rest."""
    try:
        while (yield from source.skip_space()) == ",":
            source.pos += 1
            yield from source.skip_space()
            yield from output_json.string(source, drop)
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            yield from output_json.value(source, drop)
        yield from source.expect("}")
    except MalformedError:
        return
