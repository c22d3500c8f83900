"""``tools`` and ``tool_choice`` of a chat request: checked, and what they ask of the answer. Pure.

A tool_choice that is required or names a function has a grammar that holds the calls to the
functions' parameters: of a list of calls as JSON, or of the arguments alone. With auto the list
holds what the model writes as calls of its own accord, if a function is ``strict``.
"""

import json
import re
from typing import Any

import msgspec

from zlm.errors import BadRequest, clip
from zlm.frontend.openai.body import check_depth, mistyped
from zlm.messages import Grammar, ToolOptions

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16  # a bound for models that do not know when to stop
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_SCHEMA_MAPS = {"properties", "$defs", "definitions"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "prefixItems"}
_OPEN_BY_WORDS = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref",
}  # fmt: skip
_ANY_OBJECT = {"type": "object"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION_CHOICE = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"


class ToolRequest(msgspec.Struct, frozen=True):
    """What a request asks for. ``tools`` go into the prompt, None: there are none."""

    tools: list[dict[str, Any]] | None = None
    options: ToolOptions | None = None  # None: the answer holds no calls
    grammar: Grammar | None = None  # None: the model decides


def tool_request(tools: list[dict[str, Any]] | None, choice: Any, *, parallel: bool) -> ToolRequest:
    """Return what *tools* and *choice* ask for; BadRequest, naming the field, if they cannot be."""
    check_depth(tools, "tools")
    check_depth(choice, "tool_choice")
    functions = _functions(tools or [])
    kind, names = _choice(choice, list(functions))
    if kind == "none" or not functions:
        if kind in ("required", "named"):
            raise BadRequest(f"tool_choice {clip(choice)} needs tools", param="tool_choice")
        return ToolRequest()
    options = ToolOptions(names=names, choice=kind, parallel=parallel)
    chosen = {name: functions[name] for name in names}
    return ToolRequest(tools, options, _grammar(chosen, kind, parallel))


def _functions(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the functions by name."""
    if len(tools) > MAX_TOOLS:
        message = f"tools has {len(tools)} entries, the limit is {MAX_TOOLS}"
        raise BadRequest(message, param="tools")
    functions: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise mistyped(f"{where}.type", "'function'", tool["type"])
        function = tool.get("function")
        if not isinstance(function, dict):
            raise mistyped(f"{where}.function", "an object", function)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise mistyped(f"{where}.function.name", "1 to 128 of A-Z a-z 0-9 _ . : / -", name)
        if name in functions:
            message = f"{where}.function.name: two functions are called {name!r}"
            raise BadRequest(message, param=f"{where}.function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise mistyped(f"{where}.function.parameters", "a JSON schema", parameters)
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise mistyped(f"{where}.function.strict", "true or false", strict)
        functions[name] = function
    return functions


def _choice(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """Return none, auto, required or named, and the names that may be called."""
    if choice is None:
        return "auto", names
    if choice in ("none", "auto", "required"):
        return choice, names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        return "named", [_listed(name, names, "tool_choice.function.name")]
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), names)
    raise mistyped("tool_choice", _FUNCTION_CHOICE, choice)


def _allowed(allowed: Any, names: list[str]) -> tuple[str, list[str]]:
    """Return what a choice of ``allowed_tools`` means."""
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        message = "tool_choice.allowed_tools needs a mode, auto or required, and tools"
        raise BadRequest(message, param="tool_choice")
    chosen = []
    for tool in listed:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        chosen.append(_listed(name, names, "tool_choice.allowed_tools.tools"))
    return mode, list(dict.fromkeys(chosen))


def _listed(name: Any, names: list[str], param: str) -> str:
    if not isinstance(name, str):
        raise mistyped(param, "a string", name)
    if name not in names:
        raise BadRequest(f"{param}: no tool is called {clip(repr(name))}", param=param)
    return name


def _grammar(functions: dict[str, dict[str, Any]], kind: str, parallel: bool) -> Grammar | None:
    """Return what holds the output to calls of *functions*; None where the model decides."""
    schemas = {
        name: _parameters(function) if kind != "auto" or function.get("strict") else _ANY_OBJECT
        for name, function in functions.items()
    }
    if kind == "named":
        (schema,) = schemas.values()
        return Grammar("json_schema", json.dumps(schema))
    if kind == "auto" and not any(function.get("strict") for function in functions.values()):
        return None
    calls = []
    definitions = {}
    for i, (name, schema) in enumerate(schemas.items()):
        if _refers(schema):
            place = f"tool{i}"
            definitions[place] = _moved(schema, f"#/$defs/{place}")
            schema = {"$ref": f"#/$defs/{place}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = MAX_FORCED_CALLS if parallel else 1
    whole: dict[str, Any] = {
        "type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most,
    }  # fmt: skip
    if definitions:
        whole["$defs"] = definitions
    if kind == "auto":  # nobody asked for a call: what cannot be enforced is no reason to refuse
        whole["x-guidance"] = {"lenient": True, "coerce_one_of": True}
    return Grammar("json_schema", json.dumps(whole))


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments: always one of an object."""
    schema = function.get("parameters")
    if not schema:
        return _NO_PARAMETERS
    whole = schema if "type" in schema or _refers(schema) else {"type": "object", **schema}
    return _closed(whole)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those it names.

    Clients that mean so rarely say it, and a small model would invent properties until its limit.
    What fits the result fits *schema*. An object that says what else it may have is left as it is,
    and so is one put together from several schemas.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _SCHEMA_MAPS & closed.keys():
        if isinstance(closed[key], dict):
            closed[key] = {name: _closed(item) for name, item in closed[key].items()}
    for key in _SCHEMA_LISTS & closed.keys():
        if isinstance(closed[key], list):
            closed[key] = [_closed(item) for item in closed[key]]
    if "items" in closed:
        closed["items"] = _closed(closed["items"])
    if "properties" in closed and not _OPEN_BY_WORDS & closed.keys():
        closed["additionalProperties"] = False
    return closed


def _refers(value: Any) -> bool:
    """Tell whether a schema has references within itself."""
    if isinstance(value, dict):
        return isinstance(value.get("$ref"), str) or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _moved(value: Any, root: str) -> Any:
    """Return a schema with its references as they must be when it stands at *root*."""
    if isinstance(value, dict):
        return {
            key: root + item[1:]
            if key == "$ref" and isinstance(item, str) and item.startswith("#")
            else _moved(item, root)
            for key, item in value.items()
        }
    return [_moved(item, root) for item in value] if isinstance(value, list) else value
