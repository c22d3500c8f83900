"""Reasoning, content and tool calls out of text: every format, whole, cut, broken, in any chunking.

CASES 80, 82, 84.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from output_events import joined

from zlm.tokenizer.output_known import NAMED, REASONING_FORMATS, REQUIRED, TOOL_FORMATS
from zlm.tokenizer.output_parser import OutputParser
from zlm.tokenizer.output_source import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from zlm.tokenizer.tools_schemas import Functions

KNOWN = ("f", "get_weather", "g.h")
FORMATS = {**TOOL_FORMATS, "required": REQUIRED}
ARGUMENTS = '{"city": "Zürich", "days": [1, -2.5e3, true, null], "o": {"q": "a\\"b\\u00e9"}}'


def parse(name: str, *chunks: str, **keywords: Any) -> list[Event]:
    parser = OutputParser(None, FORMATS[name], functions=Functions(KNOWN), **keywords)
    events = [event for chunk in chunks for event in parser.push(chunk)]
    return joined([*events, *parser.flush()])


def called(name: str, arguments: str = ARGUMENTS) -> list[Event]:
    return [CallBegin(name), CallArguments(arguments), CallEnd()]


WEATHER = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
PYTHON = "[get_weather(city='Zürich', days=[1, -2.5e3, True, None], o={\"q\": 'a\"bé'}), f()]"
OBJECT = '{"q": "a\\"b\\u00e9"}'
TAGGED = (
    "{0}city{1}Zürich{2}</parameter>\n{0}days{1}[1, -2.5e3, true, null]{2}</parameter>\n"
    "{0}o{1}" + OBJECT.replace("{", "{{").replace("}", "}}") + "{2}</parameter>\n"
)
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
    "qwen3_coder": (
        "Sure.\n<tool_call>\n<function=get_weather>\n" + TAGGED.format("<parameter=", ">\n", "\n")
        + "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        [Content("Sure."), *called("get_weather"), *called("f", "{}")],
    ),
    "qwen3_coder_untagged": (
        "Sure.\n<function=get_weather>\n" + TAGGED.format("<parameter=", ">", "")
        + "</function>\n<function=f></function></tool_call> Done.",
        [Content("Sure."), *called("get_weather"), *called("f", "{}"), Content("Done.")],
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n" + TAGGED.format("<parameter=", ">", "")
        + "</function>\n</seed:tool_call>",
        called("get_weather"),
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        + TAGGED.format('<parameter name="', '">', "")
        + '</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        [*called("get_weather"), *called("f", "{}")],
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="m" string="false">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        called("get_weather", '{"city": "Zürich", "n": "5", "m": 5}'),
    ),
    "glm45": (
        "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>[1, -2.5e3, true, null]</arg_value>\n<arg_key>o"
        f"</arg_key>\n<arg_value>{OBJECT}</arg_value>\n</tool_call>\n<tool_call>f</tool_call>",
        [Content("Sure."), *called("get_weather"), *called("f", "{}")],
    ),
    "deepseek_v3": (
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + ARGUMENTS + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Content("Sure."), *called("get_weather"), *called("f", "{}")],
    ),
    "deepseek_v3_one": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + ARGUMENTS
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        [*called("get_weather"), *called("f", "{}")],
    ),
    "kimi_k2": (
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>"
        "functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [
            Content("Sure."),
            CallBegin("get_weather", "functions.get_weather:0"), *called("get_weather")[1:],
            CallBegin("f", "functions.f:1"), *called("f", "{}")[1:],
        ],
    ),
    "harmony": (
        "<|channel|>commentary<|message|>Sure.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|end|><|start|>"
        "assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        [Content("Sure."), *called("get_weather"), *called("f", "{}")],
    ),
    "granite": (f"<|tool_call|>[{WEATHER}]", called("get_weather")),
    "phi4_mini": (f"<|tool_call|>[{WEATHER}]<|/tool_call|>", called("get_weather")),
    "functools": (f"functools[{WEATHER}]", called("get_weather")),
    "cohere": (
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        + ARGUMENTS + '},\n{"tool_call_id": "1", "tool_name": "f", "parameters": {}}\n]'
        "<|END_ACTION|>",
        [*called("get_weather"), *called("f", "{}")],
    ),
    "nemotron": (
        f"Sure.<TOOLCALL>[{WEATHER}]</TOOLCALL>", [Content("Sure."), *called("get_weather")],
    ),
    "tool_calls": (
        f'<tool_calls>\n{WEATHER}\n{{"name": "f"}}\n</tool_calls>',
        [*called("get_weather"), *called("f", "{}")],
    ),
    "internlm": (f"<|action_start|><|plugin|>\n{WEATHER}<|action_end|>", called("get_weather")),
    "lfm2": (
        f"<|tool_call_start|>{PYTHON}<|tool_call_end|>Done.",
        [*called("get_weather", PLAIN_ARGUMENTS), *called("f", "{}"), Content("Done.")],
    ),
    "olmo3": (
        f"Sure. <function_calls>\n{PYTHON[1:-6]}\nf()\n</function_calls>",
        [Content("Sure."), *called("get_weather", PLAIN_ARGUMENTS), *called("f", "{}")],
    ),
}  # fmt: skip


def format_of(case: str) -> str:
    for ending in ("_named", "_list", "_untagged", "_one"):
        case = case.removesuffix(ending)
    return case


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


@pytest.mark.parametrize("case", WHOLE)
def test_the_beginning_of_a_call_that_a_limit_cuts_is_no_content(case: str) -> None:
    """CASE 80: behind what surely opens a call nothing of it is told as content."""
    openings = FORMATS[format_of(case)].openings
    if not openings:
        return
    text, events = WHOLE[case]
    start = min(at for opening in openings if (at := text.find(opening)) >= 0)
    opening = next(o for o in openings if text.startswith(o, start))
    before = events[0].text if isinstance(events[0], Content) else ""
    end = text.rindex("Done.") if text.endswith("Done.") else len(text)
    for length in range(start + len(opening), end):
        parser = OutputParser(None, FORMATS[format_of(case)], functions=Functions(KNOWN))
        found = joined([*parser.push(text[:length]), *parser.flush(cut=True)])
        content = "".join(event.text for event in found if isinstance(event, Content))
        more = content.removeprefix(before).strip()  # perhaps the start of the next one's opening
        assert any(o.startswith(more) and o != more for o in openings), text[:length]


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
    "qwen3_coder": [
        "<tool_call>\nhello</tool_call>", "<function=unknown></function>", "<tool_call><function=>",
        "<function=f", "<function=f>hello", "<tool_call><function=f><parameter=\n>", "</function>",
    ],
    "minimax_m2": ["<minimax:tool_call>x</minimax:tool_call>", '<invoke name="f>', "<invoke"],
    "glm45": ["<tool_call>", "<tool_call>{}</tool_call>", "<tool_call>f hello", "<tool_call>f<arg"],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>x",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]",
        "<｜tool▁call▁begin｜>f", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n5",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>f", "<|tool_call_begin|>a b:0"
        "<|tool_call_argument_begin|>{}",
    ],
    "cohere": ["<|START_ACTION|>[]<|END_ACTION|>", "<|START_ACTION|>"],
    "lfm2": ["[1]", "<|tool_call_start|>[unknown()]<|tool_call_end|>", "<|tool_call_start|>f()"],
    "olmo3": ["f(a=1)", "<function_calls>\nunknown()", "<function_calls>[f()]"],
    "functools": ["import functools", "functools.wraps(f)", "functools[1]"],
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


def test_quotes_that_nobody_escaped() -> None:
    """LFM2 writes strings as they are, between single quotes."""
    text = "[f(a='it's the dogs' toys', b=['x', 'y'], c={'k': 'l'} , d='m' )]"
    for chunks in ([text], text):
        _, arguments, _ = parse("lfm2", *chunks)
        assert isinstance(arguments, CallArguments)
        assert json.loads(arguments.text) == {
            "a": "it's the dogs' toys", "b": ["x", "y"], "c": {"k": "l"}, "d": "m",
        }  # fmt: skip


def test_only_so_many_calls_as_are_wanted() -> None:
    text, events = WHOLE["hermes"]
    assert parse("hermes", text, most_calls=1) == events[:4]
    assert parse("hermes", *text, most_calls=1) == events[:4]


def test_a_named_call_is_the_whole_text() -> None:
    parser = OutputParser(None, NAMED, functions=Functions(["f"]), most_calls=1)
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


@pytest.mark.parametrize("closed", [True, False])
def test_a_section_of_calls_ends_thoughts_that_are_not_closed(closed: bool) -> None:
    for name in ("kimi_k2", "deepseek_v3"):
        text, events = WHOLE[name]
        calls = text.removeprefix("Sure.")
        parser = OutputParser(REASONING_FORMATS["think"], TOOL_FORMATS[name], in_reasoning=True)
        said = f"Hm. {'</think>' if closed else ''}{calls}"
        assert joined([*parser.push(said), *parser.flush()]) == [Reasoning("Hm."), *events[1:]]


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
            functions=Functions(KNOWN),
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
