"""Reasoning, content and tool calls out of text: every format, whole, cut, broken, in any chunking.

CASES 80, 82, 84.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from zlm.tokenizer.output_parser import (
    NAMED,
    REASONING_FORMATS,
    REQUIRED,
    TOOL_FORMATS,
    OutputParser,
    joined,
)
from zlm.tokenizer.output_source import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)

KNOWN = ("f", "get_weather", "g.h")
FORMATS = {**TOOL_FORMATS, "required": REQUIRED}
ARGUMENTS = '{"city": "Zürich", "days": [1, -2.5e3, true, null], "o": {"q": "a\\"b\\u00e9"}}'


def parse(name: str, *chunks: str, **keywords: Any) -> list[Event]:
    parser = OutputParser(None, FORMATS[name], known=KNOWN, **keywords)
    events = [event for chunk in chunks for event in parser.push(chunk)]
    return joined([*events, *parser.flush()])


def called(name: str, arguments: str = ARGUMENTS) -> list[Event]:
    return [CallBegin(name), CallArguments(arguments), CallEnd()]


WEATHER = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
PYTHON = "[get_weather(city='Zürich', days=[1, -2.5e3, True, None], o={\"q\": 'a\"bé'}), f()]"
GEMMA = 'city:{0}Zürich{0},days:[1,-2.5e3,true,null],o:{{q:{0}a"bé{0}}}'
PLAIN_ARGUMENTS = '{"city": "Zürich", "days": [1, -2.5e3, true, null], "o": {"q": "a\\"bé"}}'
WHOLE = {
    "hermes": (
        f'Sure.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{{"name": "f"}}</tool_call>',
        [Content("Sure."), *called("get_weather"), *called("f", "{}")],
    ),
    "mistral": (
        f'Sure. [TOOL_CALLS] [{WEATHER}, {{"name": "f", "arguments": {{}}}}]',
        [Content("Sure."), *called("get_weather"), *called("f", "{}")],
    ),
    "mistral_named": (
        f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{ARGUMENTS}[TOOL_CALLS]f{{}}",
        [*called("get_weather"), *called("f", "{}")],
    ),
    "llama3_json": (
        f'<|python_tag|>{WEATHER.replace("arguments", "parameters")}; {{"name": "f"}}',
        [*called("get_weather"), *called("f", "{}")],
    ),
    "pythonic": (PYTHON, [*called("get_weather", PLAIN_ARGUMENTS), *called("f", "{}")]),
    "functiongemma": (
        "<start_function_call>call:get_weather{" + GEMMA.format("<escape>")
        + "}<end_function_call><start_function_call>call:f{}<end_function_call>",
        [*called("get_weather", PLAIN_ARGUMENTS), *called("f", "{}")],
    ),
    "gemma4": (
        "Sure.<|tool_call>call:get_weather{" + GEMMA.format('<|"|>')
        + "}<tool_call|><|tool_call>call:f{}<tool_call|>",
        [Content("Sure."), *called("get_weather", PLAIN_ARGUMENTS), *called("f", "{}")],
    ),
    "json": (f"```json\n{WEATHER}\n```\nDone.", [*called("get_weather"), Content("Done.")]),
    "json_list": (f'\n[{WEATHER}, {{"name": "f"}}]', [*called("get_weather"), *called("f", "{}")]),
    "required": (f'[{WEATHER},{{"name": "f"}}]', [*called("get_weather"), *called("f", "{}")]),
}  # fmt: skip


def format_of(case: str) -> str:
    return case.removesuffix("_named").removesuffix("_list")


@pytest.mark.parametrize("case", WHOLE)
def test_whole_calls(case: str) -> None:
    text, events = WHOLE[case]
    assert parse(format_of(case), text) == events
    for event in events:
        if isinstance(event, CallArguments):
            json.loads(event.text)


@pytest.mark.parametrize("case", WHOLE)
def test_one_character_at_a_time(case: str) -> None:
    """CASE 82: however it is cut, the same call."""
    text, events = WHOLE[case]
    assert parse(format_of(case), *text) == events


@pytest.mark.parametrize("case", WHOLE)
def test_a_cut_call_has_no_end_and_nothing_is_lost(case: str) -> None:
    """CASE 80: at every length of the text, what is told is a prefix of the whole call."""
    text, events = WHOLE[case]
    ends = events.count(CallEnd())
    for length in range(len(text)):
        found = parse(format_of(case), text[:length])
        assert found.count(CallEnd()) <= ends
        calls = [e for e in found if not isinstance(e, Content)]
        wanted = [e for e in events if not isinstance(e, Content)]
        for mine, whole in zip(calls, wanted, strict=False):
            if isinstance(mine, CallArguments) and isinstance(whole, CallArguments):
                assert whole.text.startswith(mine.text)
            else:
                assert mine == whole


MALFORMED = {
    "hermes": [
        "<tool_call>", "<tool_call>\nhello</tool_call>", '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>', "a <tool_call>[]</tool_call> b", "<tool_cal",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "</tool_call>", "a <",
        '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', '<tool_call>{"name": "\\ud83d"}',
        '<tool_call>{"arguments": {"a":' + "[" * 150, "<tool_call>{'name': 'f'}</tool_call>",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]f", "[TOOL_CALLS] f x", "[TOOL_C"],
    "llama3_json": [
        '{"name": "unknown", "parameters": {}}', '{"a": 1}', "{", "<|python_tag|>f.call(x=1)",
        ' \n{"name": "Ada"} is', "<|python_tag|>", "[1, 2]", "x = {}", "",
    ],
    "pythonic": ["[1, 2]", "[]", "[unknown(a=1)]", "[f(1)]", "[f(a)]", "f(a=1)", "[f", " [f("],
    "functiongemma": ["<start_function_call>", "<start_function_call>call:{}", "<start_function"],
    "gemma4": ["<|tool_call>f{}<tool_call|>", "<|tool_call>call:f<tool_call|>"],
    "json": [
        '{"name": "unknown", "arguments": {}}', "```json\n[1]\n```", "[", '"f"', "```", "`",
        '```json\n{"name": "Bob", "age": 5}\n```\nThat is all.',
    ],
    "required": ["hello", "{}"],
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_is_content(name: str) -> None:
    for text in MALFORMED[name]:
        assert parse(name, text) == ([Content(text)] if text else [])
        assert parse(name, *text) == ([Content(text)] if text else [])


def test_a_call_after_a_broken_one_is_found() -> None:
    text = '<tool_call>oops<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse("hermes", text) == [Content("<tool_call>oops"), *called("f", "{}")]


def test_a_call_that_breaks_in_its_arguments_has_no_end() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    assert parse("hermes", text) == [
        CallBegin("f"), CallArguments('{"a": '), Content("oops}}</tool_call>"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "inside",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}'.replace(": 1", ": 1"),
        '{"id": "x", "name": "f", "parameters": {"a": 1}, "type": "function"}',
        '{"name": "f", "arguments": {"a": 1}',
        '[{"name": "f", "arguments": {"a": 1}}]',
    ],
)
def test_other_ways_to_write_a_call(inside: str) -> None:
    assert parse("hermes", f"<tool_call>{inside}</tool_call>") == called("f", '{"a": 1}')


def test_strings_are_mended() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d\\\'\\u12 \\n"}}</tool_call>'
    _, arguments, _ = parse("hermes", text)
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"a": "x\ny\\d'\\u12 \n"}


def test_python_values() -> None:
    text = (
        '[f(a=\'it\\\'s\', b="""two\n"lines" """, c=(1, .5, 1_000), d={\'k\': []}, '
        "e='\\x41\\u00e9\\q', h='', i=-07,)]"
    )
    _, arguments, _ = parse("pythonic", *text)
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {
        "a": "it's", "b": 'two\n"lines" ', "c": [1, 0.5, 1000], "d": {"k": []},
        "e": "Aé\\q", "h": "", "i": -7,
    }  # fmt: skip


def test_only_so_many_calls_as_are_wanted() -> None:
    text, events = WHOLE["hermes"]
    assert parse("hermes", text, most_calls=1) == events[:4]
    assert parse("hermes", *text, most_calls=1) == events[:4]


def test_a_named_call_is_the_whole_text() -> None:
    parser = OutputParser(None, NAMED, known=["f"], most_calls=1)
    events = parser.push(' {"a": 1') + parser.push("}") + parser.push(" more")
    assert joined(events) == called("f", '{"a": 1}')
    assert parser.enough and parser.flush() == []


def test_a_forced_call_that_is_cut_is_not_content() -> None:
    """CASE 80: no raw markup where a limit cuts a required call."""
    assert parse("required", '[{"name": "get_w') == []
    assert parse("required", '[{"name": "f", "arguments": {"a"') == [
        CallBegin("f"), CallArguments('{"a"'),
    ]  # fmt: skip


# ------------------------------------------------------------------------------ reasoning


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("<think>\nHm. \n</think>\n\nHello ", [Reasoning("Hm."), Content("Hello ")]),
        ("Hello <think>x</think>", [Content("Hello <think>x</think>")]),
        ("<think></think>Hello", [Content("Hello")]),
        (" <thin", [Content(" <thin")]),
        ("<think>a</thi", [Reasoning("a</thi")]),
        ("\n\nHello", [Content("\n\nHello")]),
    ],
)
def test_reasoning(text: str, events: list[Event]) -> None:
    for chunks in ([text], list(text)):
        parser = OutputParser(REASONING_FORMATS["think"], None)
        found = [event for chunk in chunks for event in parser.push(chunk)]
        assert joined([*found, *parser.flush()]) == events


def test_reasoning_that_the_prompt_or_the_format_opens() -> None:
    for name, opened in (("think", True), ("deepseek_r1", False)):
        for text in ("Hm.</think>Hi", "<think>\nHm.\n</think>\nHi"):
            parser = OutputParser(REASONING_FORMATS[name], None, in_reasoning=opened)
            assert joined(parser.push(text)) == [Reasoning("Hm."), Content("Hi")]
            assert parser.passes_on


def test_calls_follow_thoughts_but_stand_not_in_them() -> None:
    text = (
        '<think>I <tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "f"}</tool_call>'
    )
    parser = OutputParser(REASONING_FORMATS["think"], TOOL_FORMATS["hermes"])
    assert joined([*parser.push(text), *parser.flush()]) == [
        Reasoning('I <tool_call>{"name": "f"}</tool_call>'), *called("f", "{}"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------ properties

PIECES = [
    *(text for text, _ in WHOLE.values()),
    *(text for texts in MALFORMED.values() for text in texts),
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '{"name": "f"',
    ', "arguments": {', '"a": ', '"x\\', "}", "]", "{", "[", ";", ",", "\n", " ", "f(", "a=", "'",
    "\\", "<|python_tag|>", "```json", "```", "call:f{", "<|tool_call>", '<|"|>', "<escape>", "é",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    reasoning=st.sampled_from([None, *REASONING_FORMATS]),
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    most_calls=st.sampled_from([None, 1]),
)
def test_any_chunking_gives_the_same_events(
    name: str, reasoning: str | None, pieces: list[str], cuts: list[int], most_calls: int | None
) -> None:
    text = "".join(pieces)
    at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    chunks = [text[a:b] for a, b in pairwise(at)]
    results = []
    for parts in ([text], chunks, list(text)):
        parser = OutputParser(
            None if reasoning is None else REASONING_FORMATS[reasoning],
            FORMATS[name],
            known=KNOWN,
            most_calls=most_calls,
        )
        events = [event for part in parts for event in parser.push(part)]
        results.append(joined([*events, *parser.flush()]))
        assert parser.completed_calls == results[-1].count(CallEnd())
    assert results[0] == results[1] == results[2]
    arguments = ""
    for event in results[0]:
        match event:
            case CallBegin():
                arguments = ""
            case CallArguments(more):
                arguments += more
            case CallEnd():
                assert isinstance(json.loads(arguments), dict)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(TOOL_FORMATS)), text=st.text(max_size=40))
def test_text_without_calls_is_passed_on_unchanged(name: str, text: str) -> None:
    assert parse(name, *text) == ([Content(text)] if text else [])
