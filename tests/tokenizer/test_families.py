"""Every family's calls and thoughts, written by its template and read again: CASES 81, 82.

What a template writes of an earlier turn is what the model writes itself, so it must come back as
it was: the format is found in the template, and the whole way through the core gives the answer.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from family_templates import FAMILIES, Family
from hypothesis import given, settings, strategies as st
from scripted_model import Model

from zlm.messages import ChatPrompt
from zlm.tokenizer.chat_template import ChatRenderer
from zlm.tokenizer.output_formats import reasoning_format, tool_format
from zlm.tokenizer.output_known import REASONING_FORMATS, TOOL_FORMATS
from zlm.tokenizer.output_parser import OutputParser
from zlm.tokenizer.output_source import CallArguments, CallBegin, CallEnd, Content, Reasoning
from zlm.tokenizer.tools_schemas import Functions
from zlm.tokenizer.vocabulary import Vocabulary

USER = {"role": "user", "content": "How is it?"}
NAMES = ("get_weather", "f")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"type": "array"},
        "sure": {"type": ["boolean", "null"]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
ARGUMENTS = {"city": 'Zürich "x"\n<b>', "days": 3, "more": [1, {"a": None}], "sure": True}
Calls = list[tuple[str, dict[str, Any]]]


def assistant(content: str, thoughts: str, calls: Calls) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": f"functions.{name}:{i}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def written(renderer: ChatRenderer, family: Family, message: dict[str, Any]) -> str:
    """Return what the template makes of an assistant's *message*, behind the prompt."""
    before = renderer.render(ChatPrompt([USER], tools=TOOLS)).text
    chat = ChatPrompt([USER, message], tools=TOOLS, add_generation_prompt=False)
    whole = renderer.render(chat).text
    # Some templates drop earlier thoughts, and with them the tag that the prompt ends in.
    dropped = next(
        t for t in ("", "<think>\n", "</think>") if whole.startswith(before.removesuffix(t))
    )
    text = whole.removeprefix(before.removesuffix(dropped))
    if family.end:
        text, found, _ = text.rpartition(family.end)
        assert found
    thoughts = message.get("reasoning_content")
    return f"{thoughts}\n</think>\n\n{text}" if dropped and thoughts else text


def read(family: Family, text: str, size: int) -> tuple[str, str, Calls]:
    parser = OutputParser(
        None if family.reasoning is None else REASONING_FORMATS[family.reasoning],
        TOOL_FORMATS[family.tools],
        functions=Functions(NAMES, TOOLS),
        in_reasoning=family.opens,
    )
    events = [e for at in range(0, len(text), size) for e in parser.push(text[at : at + size])]
    content, thoughts = "", ""
    calls: list[tuple[str, str]] = []
    ends = 0
    for event in [*events, *parser.flush()]:
        match event:
            case Content(more):
                content += more
            case Reasoning(more):
                thoughts += more
            case CallBegin(name):
                calls.append((name, ""))
            case CallArguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case CallEnd():
                ends += 1
    assert ends == len(calls)
    return content, thoughts, [(name, json.loads(arguments)) for name, arguments in calls]


def renderer_of(vocabularies: dict[str, Vocabulary], family: Family) -> ChatRenderer:
    tokenizer = vocabularies["byte_level"].tokenizer
    return ChatRenderer(Vocabulary(tokenizer, {}, {"default": family.template}), seconds=5.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_are_found(name: str) -> None:
    family = FAMILIES[name]
    assert tool_format(family.template) == family.tools
    assert reasoning_format(family.template) == family.reasoning


TEXTS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<>[]|'\x00"), max_size=12)
SOME_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXTS,
        "days": st.integers(-999, 10**12),
        "more": st.lists(st.booleans() | st.integers(0, 9), max_size=3),
        "sure": st.sampled_from([True, False, None]),
    },
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(arguments=st.lists(SOME_ARGUMENTS, min_size=1, max_size=3), size=st.integers(1, 50))
def test_calls_come_back_as_they_were(
    vocabularies: dict[str, Vocabulary], name: str, arguments: list[dict[str, Any]], size: int
) -> None:
    family = FAMILIES[name]
    if name == "gpt_oss":
        arguments = arguments[:1]  # one call a turn
    calls = [(NAMES[i % 2], each) for i, each in enumerate(arguments)]
    renderer = renderer_of(vocabularies, family)
    thoughts = "I ask." if family.thinks else ""
    text = written(renderer, family, assistant("", thoughts, calls))
    content, found, read_calls = read(family, text, size)
    assert (content.strip(), found, read_calls) == ("", thoughts, calls)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"llama3"}))  # text or calls, there
def test_content_before_calls(vocabularies: dict[str, Vocabulary], name: str) -> None:
    family = FAMILIES[name]
    renderer = renderer_of(vocabularies, family)
    thoughts = "Hm.\nSo." if family.thinks else ""
    calls = [("get_weather", ARGUMENTS)]
    text = written(renderer, family, assistant("Let me see.", thoughts, calls))
    for size in (1, 7, len(text)):
        assert read(family, text, size) == ("Let me see.", thoughts, calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_whole_way(make_engine: Callable, save_folder: Callable, name: str) -> None:
    """CASES 81, 82: prompt, special tokens, both modes, and the reason for the end."""
    family = FAMILIES[name]
    model = Model.of(make_engine, save_folder, family.template, specials=family.specials)
    model.tools, model.names = TOOLS, list(NAMES)
    arguments = {"city": "Zürich\n x", "days": 3}
    thoughts = "Hm é😀." if family.thinks else ""
    text = written(
        model.engine.core.renderer, family, assistant("", thoughts, [("get_weather", arguments)])
    )
    reasoning, content, calls, reason = model.answer(text)
    assert (reasoning, content.strip(), reason) == (thoughts, "", "tool_calls")
    ((called, said),) = calls
    assert called == "get_weather" and json.loads(said) == arguments
    # Without tools the same text is content, none of it lost that is no special token.
    _, content, calls, reason = model.answer(text, choice=None)
    assert not calls and reason == "stop" and "days" in content
