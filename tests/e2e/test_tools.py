"""Tool calls that SmolLM2 is made to write, over HTTP: CASES 80, 81, 82, 84."""

import json
from typing import Any

import openai
import pytest
from running_server import MODEL

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Paris for the next 3 days?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/Unit"},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "description": "Tell the time."}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def ask(client: openai.OpenAI, **fields: Any) -> tuple[Any, Any]:
    """Return the answer's choice, which its stream gave piece by piece as well."""
    fields = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "temperature": 0.0, **fields}
    whole = client.chat.completions.create(**fields).choices[0]
    calls: dict[int, list[str]] = {}
    content, finish = "", None
    for chunk in client.chat.completions.create(stream=True, **fields):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for piece in choice.delta.tool_calls or ():
            assert piece.function is not None
            if piece.index not in calls:
                assert piece.id and piece.type == "function" and piece.function.name
                calls[piece.index] = [piece.function.name, ""]
            else:
                assert piece.id is None and piece.function.name is None
            calls[piece.index][1] += piece.function.arguments or ""
    assert content == (whole.message.content or "") and finish == whole.finish_reason
    said = [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or ()]
    assert said == [calls[index] for index in sorted(calls)]
    return whole, said


def check_arguments(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "get_time":
        assert arguments == {}
        return
    assert name == "get_weather" and set(arguments) == {"city", "days", "unit"}
    assert len(arguments["city"]) <= 12 and 1 <= arguments["days"] <= 9
    assert arguments["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_named_function(client: openai.OpenAI, temperature: float) -> None:
    """CASES 81, 82: finish_reason stop, arguments that fit, the same in both modes."""
    choice, calls = ask(client, tool_choice=NAMED, temperature=temperature, seed=1)
    ((name, arguments),) = calls
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert name == "get_weather"
    check_arguments(name, arguments)


def test_required(client: openai.OpenAI) -> None:
    choice, calls = ask(
        client, tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=3
    )
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    ((name, arguments),) = calls
    check_arguments(name, arguments)
    choice, calls = ask(client, tool_choice="required", max_tokens=60)
    assert len(calls) >= 1
    for name, arguments in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
        check_arguments(name, arguments)


def test_a_call_cut_by_max_tokens(client: openai.OpenAI) -> None:
    """CASE 80."""
    for tool_choice, limit in (("required", 1), ("required", 6), ("required", 16), (NAMED, 6)):
        choice, _ = ask(client, tool_choice=tool_choice, max_tokens=limit)
        assert choice.finish_reason == "length"
        assert not choice.message.content


def test_none_leaves_the_tools_out(client: openai.OpenAI) -> None:
    """CASE 84: the prompt and the answer are those without tools."""
    plain: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0.0, "max_tokens": 8}
    bare = client.chat.completions.create(**plain)
    none = client.chat.completions.create(**plain, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == bare.choices[0].message.content
    assert none.usage is not None and bare.usage is not None
    assert none.usage.prompt_tokens == bare.usage.prompt_tokens
    choice, calls = ask(client, tool_choice="none", max_tokens=8)
    assert choice.message.content == bare.choices[0].message.content and not calls


def test_a_schema_that_cannot_be_is_refused(client: openai.OpenAI) -> None:
    hopeless = {"type": "string", "minLength": 5, "maxLength": 2}
    parameters = {"type": "object", "properties": {"a": hopeless}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"
    choice, _ = ask(client, tool_choice=NAMED)
    assert choice.finish_reason == "stop"
