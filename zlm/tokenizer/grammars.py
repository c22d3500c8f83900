"""From what a client says of an output's form to the ``Grammar`` that the engine follows.

Knows nothing of the grammar library but its options in a JSON schema.
"""

import json
from typing import Any

from zlm.errors import BadRequest, clip
from zlm.messages import Generate, Grammar
from zlm.sampling_params import StructuredOutputsParams


def grammar_of_request(message: Generate) -> Grammar | None:
    """Return what *message* asks of the output's form; BadRequest as ``grammar_of``.

    A form wins over calls that the model may make: it is the whole answer's.
    """
    grammar, form = message.grammar, message.params.structured_outputs
    may_call = grammar is None or (message.tools is not None and message.tools.choice == "auto")
    return grammar if form is None or not may_call else grammar_of(form)


def grammar_of(wanted: StructuredOutputsParams) -> Grammar:
    """Return the grammar that *wanted*, which was checked, means.

    Raises BadRequest for a schema that is no JSON, or no schema at first sight.
    """
    if wanted.json_object:
        return _with_options(Grammar("json_object"), {"type": "object"}, wanted)
    if wanted.json is not None:
        schema = _schema(wanted)
        return _with_options(Grammar("json_schema", _encoded(schema, wanted)), schema, wanted)
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.choice is not None:
        return Grammar("choice", json.dumps(wanted.choice, ensure_ascii=False))
    assert wanted.grammar is not None, "checked: one of the five is given"
    return Grammar("lark", wanted.grammar)


def _schema(wanted: StructuredOutputsParams) -> dict[str, Any] | bool:
    """Return the schema, parsed if it came as text."""
    schema = wanted.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            message = f"the JSON schema is not JSON: {clip(str(error))}"
            raise BadRequest(message, param=wanted.source) from None
    if not isinstance(schema, dict | bool):
        message = f"the JSON schema must be an object, got {clip(schema)}"
        raise BadRequest(message, param=wanted.source)
    return schema


def _with_options(
    grammar: Grammar, schema: dict[str, Any] | bool, wanted: StructuredOutputsParams
) -> Grammar:
    """Return *grammar*, or the one that *schema* becomes with the options in *wanted*."""
    options: dict[str, Any] = {}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
        options["whitespace_pattern"] = None
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    if not wanted.strict:
        options["lenient"] = True
        options["coerce_one_of"] = True
    if not options or isinstance(schema, bool):
        return grammar
    return Grammar("json_schema", _encoded({**schema, "x-guidance": options}, wanted))


def _encoded(schema: dict[str, Any] | bool, wanted: StructuredOutputsParams) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        message = f"the JSON schema is not JSON: {clip(str(error))}"
        raise BadRequest(message, param=wanted.source) from None
