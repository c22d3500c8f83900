"""The form that an output must have: ``response_format`` and ``structured_outputs``.

Knows the shapes of both fields; what is in a schema or a grammar is the tokenizer's to judge.
"""

from typing import Any, NoReturn

import msgspec

from zlm.errors import BadRequest, clip
from zlm.frontend.openai.body import check_depth, located
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


def params(response_format: Any, structured_outputs: Any) -> StructuredOutputsParams | None:
    """Return what both fields, as they came, ask for; None: any text.

    Raises BadRequest, naming the field, for a shape that is wrong and for two forms at once.
    """
    wanted = _of_format(response_format)
    outputs = _of_outputs(structured_outputs)
    if wanted is not None and outputs is not None:
        message = "response_format and structured_outputs exclude each other"
        raise BadRequest(message, param="structured_outputs")
    return wanted or outputs


def _of_format(given: Any) -> StructuredOutputsParams | None:
    if given is None:
        return None
    check_depth(given, "response_format")
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in FORMATS:
        known = ", ".join(FORMATS)
        got = clip(given if kind is None else kind)
        _refuse(f"response_format must be an object with type one of {known}, got {got}")
    if kind != "json_schema":
        _only(given, ("type",), "response_format")
        return None if kind == "text" else StructuredOutputsParams(json_object=True, source=_FORMAT)
    _only(given, ("type", "json_schema"), "response_format")
    named = given.get("json_schema")
    if not isinstance(named, dict) or named.get("schema") is None:
        _refuse("response_format of type json_schema needs json_schema: {name, schema}")
    _only(named, ("name", "description", "schema", "strict"), "response_format.json_schema")
    schema = named["schema"]
    if not isinstance(schema, dict | bool):
        _refuse(f"response_format.json_schema.schema must be an object, got {clip(schema)}")
    strict = named.get("strict")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"response_format.json_schema.strict must be true or false, got {clip(strict)}")
    return StructuredOutputsParams(json=schema, strict=strict is not False, source=_FORMAT)


def _of_outputs(given: Any) -> StructuredOutputsParams | None:
    if given is None:
        return None
    check_depth(given, _OUTPUTS)
    if not isinstance(given, dict):
        message = f"structured_outputs must be an object, got {clip(given)}"
        raise BadRequest(message, param=_OUTPUTS)
    asked = {name: value for name, value in given.items() if value is not None}
    for name, message in _REFUSED.items():
        if asked.pop(name, False):
            raise BadRequest(f"structured_outputs: {message}", param=f"{_OUTPUTS}.{name}")
    _only(asked, _OPTIONS, _OUTPUTS)
    try:
        wanted = msgspec.convert(asked, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        path, problem = located(str(error))
        where = f"{_OUTPUTS}.{path}" if path else _OUTPUTS
        raise BadRequest(f"{clip(where)}: {clip(problem)}", param=_OUTPUTS) from None
    wanted.check()
    return wanted


_FORMAT, _OUTPUTS = "response_format", "structured_outputs"


def _only(given: dict[str, Any], known: tuple[str, ...], param: str) -> None:
    for name in given:
        if name not in known:
            message = f"unknown field {param}.{clip(name)}, known are {', '.join(known)}"
            raise BadRequest(message, param=param)


def _refuse(message: str) -> NoReturn:
    raise BadRequest(message, param=_FORMAT)
