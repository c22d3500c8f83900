"""response_format and structured_outputs become what the tokenizer is asked for, or a 400."""

import pytest

from zlm.errors import BadRequest
from zlm.frontend.openai import structured
from zlm.sampling_params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("response_format", "outputs", "expected"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, None, {"json_object": True, "source": "response_format"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            None,
            {"json": SCHEMA, "source": "response_format"},
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": False}},
            None,
            {"json": {}, "strict": False, "source": "response_format"},
        ),
        (None, {"json": SCHEMA, "regex": None}, {"json": SCHEMA}),
        (None, {"json": '{"type": "null"}'}, {"json": '{"type": "null"}'}),
        (None, {"json_object": True}, {"json_object": True}),
        (None, {"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        (None, {"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        (None, {"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        (
            None,
            {"json": {}, "disable_any_whitespace": True},
            {"json": {}, "disable_any_whitespace": True},
        ),
    ],
)
def test_forms(response_format, outputs, expected):
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert structured.params(response_format, outputs) == wanted


@pytest.mark.parametrize(
    ("response_format", "outputs", "words"),
    [
        ({"type": "xml"}, None, "json_schema"),
        ("json_object", None, "json_schema"),
        ({"type": "json_object", "schema": {}}, None, "response_format.schema"),
        ({"type": "json_schema"}, None, "json_schema: {name, schema}"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, None, "must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, None, "strict"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}, None, "json_schema.x"),
        ({"type": "json_object"}, {"regex": "a"}, "exclude each other"),
        (None, [], "must be an object"),
        (None, {"regexp": "a"}, "structured_outputs.regexp"),
        (None, {"source": "x", "regex": "a"}, "structured_outputs.source"),
        (None, {"structural_tag": "x"}, "structural_tag"),
        (None, {"choice": []}, "choice must not be empty"),
        (None, {"choice": [1]}, "choice[0]: expected a string, got a whole number"),
        (None, {"choice": ["x"] * 1025}, "1024"),
        (None, {"regex": "a", "choice": ["a"]}, "regex and choice"),
        (None, {"regex": "a", "disable_any_whitespace": True}, "white space"),
    ],
)
def test_wrong_shapes_are_named(response_format, outputs, words):
    """CASES 75: an unsupported type and an empty choice list are 400."""
    with pytest.raises(BadRequest) as refused:
        structured.params(response_format, outputs)
    assert words in refused.value.message
    is_unknown = "unknown field" in refused.value.message
    assert (refused.value.code == "unknown_field") == is_unknown
    assert refused.value.param.split(".")[0] in ("response_format", "structured_outputs")


def test_unknown_fields_may_be_ignored(make_house):
    house = make_house(unknown_fields="ignore")
    schema = {"name": "x", "schema": {}, "foo": 1}
    form = {"type": "json_schema", "json_schema": schema, "foo": 1}
    for fields in ({"response_format": form}, {"structured_outputs": {"json": {}, "foo": 1}}):
        assert house.chat(**fields).status == 200
        assert house.generated().params.structured_outputs.json == {}


def test_a_schema_that_is_nested_too_deeply_is_refused():
    """CASES 75: more levels than can be walked."""
    schema: dict = {}
    for _ in range(1500):
        schema = {"items": schema}
    with pytest.raises(BadRequest, match="nested deeper"):
        structured.params(None, {"json": schema})
    with pytest.raises(BadRequest, match="nested deeper"):
        structured.params({"type": "json_schema", "json_schema": {"schema": schema}}, None)
