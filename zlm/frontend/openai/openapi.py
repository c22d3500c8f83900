"""GET /openapi.json: the server's routes as OpenAPI 3.1, made from the msgspec types.

Request types are those that bodies are decoded into, answer types those of ``answer_types``; the
sentences and limits of fields come from ``field_docs``, the routes from ``operations``. Pure.
"""

import copy
from collections.abc import Sequence
from typing import Any

import msgspec

from zlm import __version__
from zlm.frontend.openai.answer_types import ErrorBody
from zlm.frontend.openai.field_docs import DESCRIPTIONS, TOKEN_ID, limits_of
from zlm.frontend.openai.operation import ERRORS, Operation
from zlm.frontend.openai.operations import OPERATIONS
from zlm.frontend.openai.operations_admin import ADMIN
from zlm.sampling_params import SamplingLimits

_REFERENCE = "#/components/schemas/{name}"
_JSON = "application/json"
_STREAM = "text/event-stream"
_BEARER = "apiKey"


def document(
    *,
    root_path: str,
    forbid_unknown: bool,
    keys: bool,
    open_metrics: bool,
    vocab_size: int,
    limits: SamplingLimits,
    admin: bool,
) -> dict[str, Any]:
    """Return the document, ready for JSON.

    *forbid_unknown*: unknown fields are refused. *keys*: guarded routes ask for one. Token ids are
    less than *vocab_size*; *limits* are those of sampling.
    *admin*: administrators may have keys, so their routes are told, too.
    """
    paths: dict[str, dict[str, Any]] = {}
    operations = (*OPERATIONS, *(ADMIN if admin else ()))
    for operation in operations:
        is_open = operation.open or (operation.path == "/metrics" and open_metrics)
        entry = _operation(operation, guarded=(keys and not is_open) or operation in ADMIN)
        paths.setdefault(operation.path, {})[operation.method] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "zlm",
            "version": __version__,
            "description": "Text from large language models, over OpenAI's API and vLLM's fields.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(operations, forbid_unknown, vocab_size, limits_of(limits)),
            "responses": {
                status: {"description": text, "content": {_JSON: {"schema": _reference(ErrorBody)}}}
                for status, text in ERRORS.items()
            },
            "securitySchemes": {_BEARER: {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, *, guarded: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [_parameter(*each) for each in operation.path_parameters],
        "responses": {"200": _answer(operation)},
        "security": [{_BEARER: []}] if guarded else [],
    }
    if operation.description:
        entry["description"] = operation.description
    if operation.request is not None:
        media = {"schema": _reference(operation.request), "examples": _named(operation.examples)}
        entry["requestBody"] = {"required": True, "content": {_JSON: media}}
    codes = {*operation.errors, *(("401",) if guarded else ())}
    for code in sorted(codes):
        entry["responses"][code] = {"$ref": f"#/components/responses/{code}"}
    return entry


def _answer(operation: Operation) -> dict[str, Any]:
    response: dict[str, Any] = {"description": operation.answer_description}
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[_JSON] = {"schema": _reference(operation.answer)}
    if operation.chunk is not None:
        name = operation.chunk.__name__
        text = f"With stream: true, lines of data: with one {name} each, then data: [DONE]."
        content[_STREAM] = {"schema": {"type": "string", "description": text}}
    if operation.media_type is not None:
        content[operation.media_type] = {"schema": {"type": "string"}}
    if content:
        response["content"] = content
    return response


def _parameter(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
    }


def _named(examples: dict[str, Any]) -> dict[str, Any]:
    return {name: {"value": value} for name, value in examples.items()}


def _reference(struct: type) -> dict[str, str]:
    if struct is dict:
        return {"type": "object"}
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def _schemas(
    operations: Sequence[Operation],
    forbid_unknown: bool,
    vocab_size: int,
    limits: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return the schema of every type the table names, and of those they are made of."""
    answers: list[Any] = [ErrorBody]
    requests: dict[Any, Operation] = {}
    for operation in operations:
        answers += [k for k in (operation.answer, operation.chunk) if k not in (None, dict)]
        if operation.request is not None:
            requests.setdefault(operation.request, operation)
    kinds = [*dict.fromkeys(answers), *requests]
    _, found = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schemas = {name.rpartition(".")[2]: schema for name, schema in found.items()}
    for kind, operation in requests.items():
        _document_request(schemas[kind.__name__], operation, forbid_unknown, limits)
        _end_vocabulary(schemas[kind.__name__], vocab_size)
    return schemas


def _end_vocabulary(schema: Any, vocab_size: int) -> None:
    """Give every token id in *schema* its upper limit."""
    if isinstance(schema, list):
        for each in schema:
            _end_vocabulary(each, vocab_size)
    elif isinstance(schema, dict):
        if schema.get("format") == TOKEN_ID:
            schema["maximum"] = vocab_size - 1
        for each in schema.values():
            _end_vocabulary(each, vocab_size)


def _document_request(
    schema: dict[str, Any],
    operation: Operation,
    forbid_unknown: bool,
    limits: dict[str, dict[str, Any]],
) -> None:
    """Add to a request's *schema* what its type does not say."""
    schema["description"] = f"The body of {operation.path}."
    if operation.required:
        schema["required"] = list(operation.required)
    if operation.alternatives:
        schema["oneOf"] = [{"required": [name]} for name in operation.alternatives]
    schema["additionalProperties"] = not forbid_unknown
    properties = schema["properties"]
    for name in operation.hidden:
        properties.pop(name, None)
    for name, field in list(properties.items()):
        harmless = operation.neutral.get(name)
        if harmless is not None:
            properties[name] = _refused(field, harmless)
            continue
        if name in limits:
            _limit(field, limits[name])
        if name in (*operation.required, *operation.alternatives):
            _demand(field)
        if name in DESCRIPTIONS:
            field["description"] = DESCRIPTIONS[name]
        field.update(copy.deepcopy(operation.overrides.get(name, {})))


def _refused(field: dict[str, Any], harmless: tuple[Any, ...]) -> dict[str, Any]:
    """Return the schema of a field that is accepted only where it asks for nothing."""
    return {
        "description": "Not supported: accepted only where it asks for nothing.",
        "deprecated": True,
        "enum": [None, *harmless],
        "default": field.get("default"),
    }


def _demand(field: dict[str, Any]) -> None:
    """Take null, which stands for absent, out of a field that must be there."""
    field.pop("default", None)
    if "anyOf" in field:
        kept = [option for option in field["anyOf"] if option != {"type": "null"}]
        if len(kept) == 1:
            del field["anyOf"]
            field.update(kept[0])
        else:
            field["anyOf"] = kept


_WHERE = {  # keyword → the types it says something of
    "format": ("integer",),
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "items": ("array",),
    "maxProperties": ("object",),
    "propertyNames": ("object",),
    "additionalProperties": ("object",),
}


def _limit(field: dict[str, Any], limit: dict[str, Any]) -> None:
    """Write each of the limits into those alternatives of *field* whose type it is about."""
    for option in field.get("anyOf", [field]):
        for keyword, value in limit.items():
            if option.get("type") not in _WHERE[keyword]:
                continue
            nested = option.get(keyword)
            if isinstance(nested, dict):
                _limit(nested, value)
            else:
                option[keyword] = copy.deepcopy(value)
