"""The form that an output must have: ``response_format`` and ``structured_outputs``.

Knows the shapes of both fields; what is in a schema or a grammar is the tokenizer's to judge.
"""

from typing import Any, NoReturn

import msgspec

from zlm.errors import BadRequest, clip
from zlm.frontend.openai.body import check_depth, located, mistyped
from zlm.sampling_params import StructuredOutputsParams

FORMATS = ("text", "json_object", "json_schema")
_OPTIONS = tuple(
    name for name in StructuredOutputsParams.__struct_fields__ if name not in ("strict", "source")
)
_REFUSED = {
    "structural_tag": "structural_tag is not supported",
    "disable_additional_properties": (
        "disable_additional_properties is not supported: say additionalProperties: false in the "
        "schema"
    ),
    "disable_fallback": "disable_fallback is not supported",
}


def params(
    response_format: Any, structured_outputs: Any, *, strict: bool = True
) -> StructuredOutputsParams | None:
    """Return what both fields, as they came, ask for; None: any text.

    Raises BadRequest, naming the field, for a shape that is wrong and for two forms at once; if
    *strict*, for unknown fields too.
    """
    wanted = _of_format(response_format, strict)
    outputs = _of_outputs(structured_outputs, strict)
    if wanted is not None and outputs is not None:
        message = "response_format and structured_outputs exclude each other"
        raise BadRequest(message, param="structured_outputs")
    return wanted or outputs


def _of_format(given: Any, strict: bool) -> StructuredOutputsParams | None:
    if given is None:
        return None
    check_depth(given, "response_format")
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in FORMATS:
        known = ", ".join(FORMATS)
        got = clip(repr(given if kind is None else kind))
        _refuse(f"response_format must be an object with type one of {known}, got {got}")
    if kind != "json_schema":
        _known(given, ("type",), _FORMAT, strict)
        return None if kind == "text" else StructuredOutputsParams(json_object=True, source=_FORMAT)
    _known(given, ("type", "json_schema"), _FORMAT, strict)
    named = given.get("json_schema")
    if not isinstance(named, dict) or named.get("schema") is None:
        _refuse("response_format of type json_schema needs json_schema: {name, schema}")
    _known(named, ("name", "description", "schema", "strict"), f"{_FORMAT}.json_schema", strict)
    schema = named["schema"]
    if not isinstance(schema, dict | bool):
        _refuse(f"response_format.json_schema.schema must be an object, got {clip(repr(schema))}")
    exact = named.get("strict")
    if exact is not None and not isinstance(exact, bool):
        _refuse(
            f"response_format.json_schema.strict must be true or false, got {clip(repr(exact))}"
        )
    return StructuredOutputsParams(json=schema, strict=exact is not False, source=_FORMAT)


def _of_outputs(given: Any, strict: bool) -> StructuredOutputsParams | None:
    if given is None:
        return None
    check_depth(given, _OUTPUTS)
    if not isinstance(given, dict):
        raise mistyped(_OUTPUTS, "an object", given)
    asked = {name: value for name, value in given.items() if value is not None}
    for name, message in _REFUSED.items():
        if asked.pop(name, False):
            raise BadRequest(f"structured_outputs: {message}", param=f"{_OUTPUTS}.{name}")
    asked = _known(asked, _OPTIONS, _OUTPUTS, strict)
    try:
        wanted = msgspec.convert(asked, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        path, problem = located(str(error))
        where = f"{_OUTPUTS}.{path}" if path else _OUTPUTS
        raise BadRequest(f"{clip(where)}: {clip(problem)}", param=_OUTPUTS) from None
    wanted.check()
    return wanted


_FORMAT, _OUTPUTS = "response_format", "structured_outputs"


def _known(
    given: dict[str, Any], known: tuple[str, ...], param: str, strict: bool
) -> dict[str, Any]:
    """Return the *known* fields of *given*; BadRequest if it has others and *strict* is set."""
    for name in given:
        if strict and name not in known:
            message = f"unknown field {param}.{clip(name)}, known are {', '.join(known)}"
            raise BadRequest(message, param=param, code="unknown_field")
    return {name: value for name, value in given.items() if name in known}


def _refuse(message: str) -> NoReturn:
    raise BadRequest(message, param=_FORMAT)
