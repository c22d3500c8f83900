"""Tools in chat requests and answers over HTTP: CASES 80, 81, 82, 84."""

import json
from typing import Any

import pytest

from zlm.frontend.openai import tools
from zlm.frontend.openai.tools import MAX_FORCED_CALLS, MAX_TOOLS, tool_request
from zlm.messages import Deltas, ToolCallDelta, ToolOptions

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("f", parameters=SCHEMA, description="é"), tool("g")]
NAMED = {"type": "function", "function": {"name": "g"}}


def test_tools_reach_the_prompt_as_they_came(house):
    assert house.chat(tools=TOOLS).status == 200
    command = house.generated()
    assert command.chat.tools == TOOLS
    assert command.tools == ToolOptions(["f", "g"])
    assert command.grammar is None and command.split_reasoning
    house.chat(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    assert house.generated().tools == ToolOptions(["f", "g"], "auto", False)


@pytest.mark.parametrize("fields", [{"tools": TOOLS}, {"tools": []}, {}])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_none(house, fields, stream):
    """CASE 84: 200 with tools, with an empty list, without; tools are left out of the prompt."""
    assert house.chat(**fields, tool_choice="none", stream=stream).status == 200
    assert house.generated().chat.tools is None
    assert house.generated().tools is None


@pytest.mark.parametrize("fields", [{"tools": []}, {}, {"tools": None}])
def test_without_tools_auto_asks_for_nothing(house, fields):
    assert house.chat(**fields, tool_choice="auto", parallel_tool_calls=True).status == 200
    assert house.generated().tools is None
    house.refused(house.chat(**fields, tool_choice="required"), 400, "tool_choice")
    house.refused(house.chat(**fields, tool_choice=NAMED), 400)


def test_allowed_tools(house):
    listed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": listed}
    assert house.chat(tools=TOOLS, tool_choice=choice).status == 200
    assert house.generated().tools == ToolOptions(["g"], "required")
    assert house.generated().chat.tools == TOOLS
    for bad in ({**listed, "mode": "x"}, {**listed, "tools": []}, {**listed, "tools": [{}]}, 5):
        house.refused(house.chat(tools=TOOLS, tool_choice={**choice, "allowed_tools": bad}), 400)


@pytest.mark.parametrize("choice", ["any", 5, [], {}, {"type": "x"}, {"type": "function"}, True])
def test_bad_choices(house, choice):
    message = house.refused(house.chat(tools=TOOLS, tool_choice=choice), 400)
    assert "tool_choice" in message


def test_a_choice_of_no_tool(house):
    choice = {"type": "function", "function": {"name": "h"}}
    message = house.refused(
        house.chat(tools=TOOLS, tool_choice=choice), 400, "tool_choice.function.name"
    )
    assert "no tool is called 'h'" in message


BAD_TOOLS = {
    "string": ("x", "tools"),
    "of strings": (["x"], "tools"),
    "type": ([{"type": "web_search", "function": {"name": "f"}}], "tools[0].type"),
    "no function": ([{"type": "function"}], "tools[0].function"),
    "no name": ([{"type": "function", "function": {}}], "tools[0].function.name"),
    "bad name": ([tool("a b")], "tools[0].function.name"),
    "long name": ([tool("a" * 129)], "tools[0].function.name"),
    "twice": ([tool("f"), tool("f")], "tools[1].function.name"),
    "parameters": ([tool("f", parameters="x")], "tools[0].function.parameters"),
    "strict": ([tool("f", strict="yes")], "tools[0].function.strict"),
    "too many": ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
}


@pytest.mark.parametrize(("tools", "param"), BAD_TOOLS.values(), ids=BAD_TOOLS.keys())
def test_bad_tools(house, tools, param):
    house.refused(house.chat(tools=tools), 400, param)


def test_what_is_missing_and_what_is_empty(house):
    for given, problem in (
        ([{"type": "function"}], "tools[0].function is required"),
        ([{"function": {}}], "tools[0].function.name is required"),
        ([tool("")], "tools[0].function.name must be 1 to 128 of A-Z a-z 0-9 _ . : / -, got ''"),
    ):
        assert house.refused(house.chat(tools=given), 400, problem.split()[0]) == problem


# ------------------------------------------------------------------------------ grammars


def schema_of(tools: list[dict[str, Any]], choice: Any, *, parallel: bool = True) -> Any:
    grammar = tool_request(tools, choice, parallel=parallel).grammar
    assert grammar is not None and grammar.kind == "json_schema"
    return json.loads(grammar.text)


def test_a_named_function_holds_the_output_to_its_parameters():
    shut = {**SCHEMA, "additionalProperties": False}
    assert schema_of(TOOLS, {"type": "function", "function": {"name": "f"}}) == shut
    empty = schema_of(TOOLS, NAMED)
    assert empty == {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema_of([tool("g", parameters={"properties": {}})], NAMED)["type"] == "object"


def test_required_holds_the_output_to_a_list_of_calls():
    """CASE 81: a listed name, and arguments that fit its schema, are all that is possible."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = schema_of(TOOLS, "required")
    good = [{"name": "f", "arguments": {"a": 1}}]
    jsonschema.validate(good, schema)
    jsonschema.validate([*good, {"name": "g", "arguments": {}}], schema)
    bad: list[Any] = [
        [], [{"name": "h", "arguments": {}}], [{"name": "f", "arguments": {}}],
        [{"name": "f", "arguments": {"a": "x"}}], good * (MAX_FORCED_CALLS + 1),
        [{"name": "g", "arguments": {}, "x": 1}], [{"name": "g"}],
    ]  # fmt: skip
    for calls in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(calls, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(good * 2, schema_of(TOOLS, "required", parallel=False))


def test_strict_functions_hold_the_calls_that_a_model_makes_of_its_own_accord():
    """CASE 81: with auto, arguments of strict functions fit; those of others are any object."""
    jsonschema = pytest.importorskip("jsonschema")
    assert tool_request(TOOLS, "auto", parallel=True).grammar is None
    functions = [tool("f", parameters=SCHEMA, strict=True), tool("g", strict=False), tool("h")]
    schema = schema_of(functions, "auto")
    jsonschema.validate([{"name": "f", "arguments": {"a": 1}}], schema)
    jsonschema.validate([{"name": "g", "arguments": {"x": [5]}}], schema)
    for name, arguments in (("f", {"a": "x"}), ("f", {}), ("k", {}), ("g", [])):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": name, "arguments": arguments}], schema)
    assert schema["x-guidance"]["lenient"] is True  # nobody asked for a call
    assert "x-guidance" not in schema_of(functions, "required")


def test_references_of_parameters_still_point_at_their_definitions():
    jsonschema = pytest.importorskip("jsonschema")
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    city = {"$ref": "#/$defs/City"}
    by_name = {
        "type": "object", "properties": {"city": city}, "required": ["city"],
        "$defs": {"City": {"enum": ["Zürich"]}},
    }  # fmt: skip
    schema = schema_of([tool("n", parameters=node), tool("c", parameters=by_name)], "required")
    jsonschema.validate([{"name": "n", "arguments": {"next": {"next": {}}}}], schema)
    jsonschema.validate([{"name": "c", "arguments": {"city": "Zürich"}}], schema)
    for name, arguments in (("n", {"next": {"x": 1}}), ("c", {"city": "Bern"})):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": name, "arguments": arguments}], schema)


# ------------------------------------------------------------------------------- answers


def script(house, make_delta, finish: str = "tool_calls"):
    """Let the tokenizer answer with thoughts, content and two calls in pieces."""

    def answer(command):
        calls = [
            [ToolCallDelta(0, id="call_1", name="f")],
            [ToolCallDelta(0, '{"a":'), ToolCallDelta(0, " 1}")],
            [ToolCallDelta(1, "{}", id="call_2", name="g")],
        ]
        deltas = [
            make_delta(command, 0, "", 1, reasoning="Hm"),
            make_delta(command, 0, "Su", 2, reasoning="."),
            make_delta(command, 0, "re", 3),
            *(make_delta(command, 0, "", 4 + i, tool_calls=c) for i, c in enumerate(calls)),
            make_delta(command, 0, "", 7, finish_reason=finish),
        ]
        return [Deltas([delta]) for delta in deltas]

    house.tokenizer = answer


def test_answer_with_calls_and_thoughts(house, make_delta):
    script(house, make_delta)
    (choice,) = house.chat(tools=TOOLS).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Sure",
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
        "tool_calls": [_whole("call_1", "f", '{"a": 1}'), _whole("call_2", "g", "{}")],
    }


def _whole(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("at_once", [False, True])
def test_stream_with_calls_and_thoughts(house, make_delta, at_once):
    """CASE 82: a call's first piece has id, type and name; later ones only arguments."""
    script(house, make_delta)
    answer, house.tokenizer = house.tokenizer, lambda command: []
    client = house.client()
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True}
    client.request("POST", PATH, body)
    for message in answer(house.generated()):
        house.take(message)
        if not at_once:
            house.loop.turn()
    house.loop.turn()
    chunks = client.responses()[0].chunks()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [d.get("role") for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(d.get("content") or "" for d in deltas) == "Sure"
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "Hm."
    assert all(d or c["choices"][0]["finish_reason"] for d, c in zip(deltas, chunks, strict=True))
    pieces = [piece for d in deltas for piece in d.get("tool_calls", ())]
    arguments: dict[int, str] = {}
    for piece in pieces:
        assert set(piece) - {"id", "type"} == {"index", "function"}
        begins = piece["index"] not in arguments
        assert ("id" in piece) == ("type" in piece) == ("name" in piece["function"]) == begins
        arguments.setdefault(piece["index"], "")
        arguments[piece["index"]] += piece["function"]["arguments"]
    assert arguments == {0: '{"a": 1}', 1: "{}"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert len(chunks) == (1 if at_once else 7)


def test_a_call_alone_has_null_content(house, make_delta):
    call = ToolCallDelta(0, "{}", id="call_1", name="g")
    house.tokenizer = lambda command: [
        Deltas([make_delta(command, 0, "", 1, tool_calls=[call], finish_reason="stop")])
    ]
    (choice,) = house.chat(tools=TOOLS, tool_choice=NAMED).json()["choices"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "stop"
    (chunk,) = house.chat(tools=TOOLS, tool_choice=NAMED, stream=True).chunks()
    assert chunk["choices"][0]["delta"]["content"] is None


def test_thoughts_can_be_left_out(house):
    house.chat(include_reasoning=False)
    assert house.generated().drop_reasoning
    house.chat()
    assert not house.generated().drop_reasoning


# ------------------------------------------------------------------------------ requests


def test_calls_and_results_of_earlier_turns(house):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "y", "tool_calls": []},
    ]
    assert house.post(PATH, {"messages": messages, "tools": TOOLS}).status == 200
    sent = house.generated().chat.messages
    assert sent[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert sent[2] == messages[2]
    assert "tool_calls" not in sent[3]


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "messages[0].tool_calls"),
        ([5], "messages[0].tool_calls[0].function"),
        ([{"id": "1"}], "messages[0].tool_calls[0].function"),
        ([{"function": {"arguments": "{}"}}], "messages[0].tool_calls[0].function"),
        (
            [{"function": {"name": "f", "arguments": [1]}}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_calls_of_earlier_turns(house, calls, param):
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    house.refused(house.post(PATH, {"messages": messages}), 400, param)


def test_forced_arguments_have_no_properties_that_nobody_named() -> None:
    """Clients that mean so rarely say it; an object that says otherwise is left open."""
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    parameters = {
        "properties": {
            "place": {"anyOf": [inner, {"type": "null"}]},
            "many": {"type": "array", "items": {"$ref": "#/$defs/thing"}},
            "extra": {"type": "object", "properties": {}, "additionalProperties": {"type": "null"}},
            "both": {"allOf": [inner], "properties": {"a": {}}},
        },
        "$defs": {"thing": inner},
    }
    closed = tools._parameters({"parameters": parameters})
    shut = {**inner, "additionalProperties": False}
    assert closed["additionalProperties"] is False
    properties = closed["properties"]
    assert properties["place"]["anyOf"] == [shut, {"type": "null"}]
    assert closed["$defs"]["thing"] == shut
    assert properties["extra"] == parameters["properties"]["extra"]
    assert properties["both"] == parameters["properties"]["both"]
