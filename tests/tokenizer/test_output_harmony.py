"""Harmony: channels become reasoning, content and calls. CASES 80, 82, 84."""

import pytest
from output_events import joined

from zlm.tokenizer.output_known import REASONING_FORMATS, TOOL_FORMATS
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

THOUGHT = "<|channel|>analysis<|message|>Hm: <f>? <|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALLED = [CallBegin("f"), CallArguments('{"a": 1}'), CallEnd()]


def parse(*chunks: str, tools: bool = True, reasoning: bool = True) -> list[Event]:
    parser = OutputParser(
        REASONING_FORMATS["harmony"] if reasoning else None,
        TOOL_FORMATS["harmony"] if tools else None,
        functions=Functions(["f"]),
    )
    events = [event for chunk in chunks for event in parser.push(chunk)]
    return joined([*events, *parser.flush()])


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"{THOUGHT}{FINAL}Hello. ", [Reasoning("Hm: <f>?"), Content("Hello. ")]),
        (f"{THOUGHT}{FINAL}Hello.<|return|>", [Reasoning("Hm: <f>?"), Content("Hello.")]),
        (f'{THOUGHT}{CALL}{{"a": 1}}', [Reasoning("Hm: <f>?"), *CALLED]),
        (f'{CALL}\n{{"a": 1}}\n<|call|> more', CALLED),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1}', CALLED),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', CALLED),
        (
            f"{THOUGHT}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>"
            f"I ask.<|end|>{FINAL}So.",
            [Reasoning("Hm: <f>?\nHm: <f>?"), Content("I ask.\nSo.")],
        ),
        (
            f"<|channel|>analysis to=python code<|message|>1 + 1<|call|>{FINAL}2",
            [Reasoning("1 + 1"), Content("2")],
        ),
        ("<|channel|>final <|constrain|>json<|message|>[1]", [Content("[1]")]),
        ("without a head <b>", [Content("without a head <b>")]),
        ("goes on<|end|>", [Content("goes on")]),
        (f"{CALL}no JSON<|end|>{FINAL}So.", [Content("no JSON\nSo.")]),
        (f"{THOUGHT}<|start|>assistant<|channel|>comm", [Reasoning("Hm: <f>?")]),
        ("<|channel|>analysis<|message|>", []),
        ("", []),
    ],
)  # fmt: skip
def test_messages(text: str, events: list[Event]) -> None:
    assert parse(text) == events
    assert parse(*text) == events


def test_a_call_that_is_cut_has_no_end() -> None:
    """CASE 80."""
    for length, events in ((0, []), (4, [CallBegin("f"), CallArguments('{"a"')])):
        assert parse((CALL + '{"a": 1}')[: len(CALL) + length]) == events


def test_a_call_ends_the_answer() -> None:
    parser = OutputParser(None, TOOL_FORMATS["harmony"])
    events = parser.push(f'{CALL}{{"a": 1}}<|call|>')
    assert joined(events) == CALLED and parser.enough


def test_without_tools_a_call_is_text() -> None:
    """CASE 84."""
    assert parse(f'{CALL}{{"a": 1}}<|call|>', tools=False) == [Content('{"a": 1}')]


def test_analysis_that_is_not_told_apart_is_content() -> None:
    assert parse(f"{THOUGHT}{FINAL}Hello.", reasoning=False) == [Content("Hm: <f>?\nHello.")]
