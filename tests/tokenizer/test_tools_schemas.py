"""Parameters written as plain text, made JSON by the function's schema: CASE 82."""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from zlm.tokenizer.output_known import TOOL_FORMATS
from zlm.tokenizer.output_parser import OutputParser
from zlm.tokenizer.output_source import CallArguments, CallBegin, CallEnd
from zlm.tokenizer.tools_schemas import Functions
from zlm.tokenizer.tools_values import written_json

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "map": {"type": "object"},
        "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "city": {"$ref": "#/$defs/City"},
        "loop": {"$ref": "#/properties/loop"},
        "gone": {"$ref": "#/$defs/Gone"},
        "level": {"enum": [1, 2.5, "high"]},
        "fixed": {"const": True},
        "both": {"allOf": [{"description": "x"}, {"type": "string"}]},
        "open": {"oneOf": [{"type": "string"}, {}]},
        "inner": {"properties": {}},
        "items": {"items": {}},
        "any": {},
        "bad": 5,
    },
    "$defs": {"City": {"type": "string"}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
FUNCTIONS = Functions(["f"], TOOLS)


@pytest.mark.parametrize(
    ("parameter", "kinds"),
    [
        ("text", {"string"}), ("perhaps", {"string", "null"}), ("either", {"string", "integer"}),
        ("city", {"string"}), ("level", {"integer", "number", "string"}), ("fixed", {"boolean"}),
        ("both", {"string"}), ("inner", {"object"}), ("items", {"array"}),
        ("loop", set()), ("gone", set()), ("open", set()), ("any", set()), ("bad", set()),
        ("other", set()),
    ],
)  # fmt: skip
def test_types_of_parameters(parameter: str, kinds: set[str]) -> None:
    assert FUNCTIONS.kinds("f", parameter) == kinds
    assert FUNCTIONS.kinds("g", parameter) == set()


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("text", "5", "5"), ("text", ' a "b"\n', ' a "b"\n'), ("city", "null", "null"),
        ("count", "5", 5), ("count", " 5\n", 5), ("count", "5.0", 5.0), ("count", "five", "five"),
        ("count", "5.5", "5.5"), ("share", "5", 5), ("share", "-2.5e3", -2500.0),
        ("share", "NaN", "NaN"), ("sure", "true", True), ("sure", "True", True), ("sure", "1", "1"),
        ("list", "[1, 2]", [1, 2]), ("list", "(1, 2)", [1, 2]), ("list", "[1", "[1"),
        ("list", "[1] 2", "[1] 2"), ("list", "[+1e999]", "[+1e999]"), ("count", "1__0", "1__0"),
        ("any", "9" * 9999, "9" * 9999), ("count", "+" + "9" * 9999, "+" + "9" * 9999),
        ("map", '{"a": null}', {"a": None}), ("map", "{'a': None, 'b': 1}", {"a": None, "b": 1}),
        ("map", "{1, 2}", "{1, 2}"), ("map", "[" * 9000, "[" * 9000),
        ("perhaps", "null", None), ("perhaps", "None", None), ("perhaps", "nothing", "nothing"),
        ("either", "5", 5), ("either", "5.5", "5.5"), ("level", "high", "high"), ("level", "1", 1),
        ("any", "5", 5), ("any", "five", "five"), ("any", '"five"', '"five"'), ("any", "", ""),
        ("any", "__import__('os')", "__import__('os')"),
    ],
)  # fmt: skip
def test_written_values(parameter: str, text: str, value: Any) -> None:
    said = json.loads(written_json(text, FUNCTIONS.kinds("f", parameter)))
    assert said == value and type(said) is type(value)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=20),
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "sure": st.booleans(),
        "list": st.lists(st.integers(), max_size=3),
        "map": st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3), max_size=3),
        "city": st.text(alphabet="</>parmet_vlug=\n ", max_size=20),
    },
)
WRITTEN = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n{}</function>\n</tool_call>",
        "<parameter={}>\n{}\n</parameter>\n", "</parameter>",
    ),
    "seed_oss": (
        "<seed:tool_call><function=f>{}</function></seed:tool_call>",
        "<parameter={}>{}</parameter>", "</parameter>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n{}</invoke>\n</minimax:tool_call>',
        '<parameter name="{}">{}</parameter>\n', "</parameter>",
    ),
    "glm45": (
        "<tool_call>f\n{}</tool_call>",
        "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</arg_value>",
    ),
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(WRITTEN)), arguments=VALUES, size=st.integers(1, 9))
def test_what_was_written_is_read_again(name: str, arguments: dict[str, Any], size: int) -> None:
    """Strings keep every character, white space too; all else keeps its value."""
    call, parameter, end = WRITTEN[name]
    said = ""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if end in text:
            return
        said += parameter.format(key, text)
    text = call.format(said)
    parser = OutputParser(None, TOOL_FORMATS[name], functions=FUNCTIONS)
    events = [e for at in range(0, len(text), size) for e in parser.push(text[at : at + size])]
    events += parser.flush()
    assert events[0] == CallBegin("f") and events[-1] == CallEnd()
    pieces = [event.text for event in events if isinstance(event, CallArguments)]
    assert json.loads("".join(pieces)) == arguments


def test_strings_come_as_they_are_written() -> None:
    """A long text is not held back until it ends; its closing tag is."""
    parser = OutputParser(None, TOOL_FORMATS["qwen3_coder"], functions=FUNCTIONS)
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert parser.push('a "b" < c\n') == [CallArguments('a \\"b\\" < c')]
    assert parser.push("</param") == []
    assert parser.push("ount>\n</parameter>") == [
        CallArguments("\\n</paramount>"), CallArguments('"'),
    ]  # fmt: skip
