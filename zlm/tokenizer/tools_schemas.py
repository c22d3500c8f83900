"""The functions that an answer may call, and the types that their parameters may have.

Pure; schemas are the client's, so nothing in them is taken for granted.
"""

from collections.abc import Iterable
from typing import Any

Kinds = frozenset[str]  # JSON types that a parameter may have; empty: not known

STRING: Kinds = frozenset({"string"})
_UNKNOWN: Kinds = frozenset()
_MOST_REFERENCES = 8  # that are followed one after another


class Functions:
    """Names of functions, and the types of their parameters."""

    def __init__(
        self, names: Iterable[str] = (), tools: Iterable[dict[str, Any]] | None = None
    ) -> None:
        """*tools* as OpenAI's clients send them; those not among *names* are of no account."""
        self.names = frozenset(names)
        self._schemas: dict[str, Any] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, dict) and function.get("name") in self.names:
                self._schemas[function["name"]] = function.get("parameters")
        self._kinds: dict[tuple[str, str], Kinds] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def kinds(self, function: str, parameter: str) -> Kinds:
        """Return the types that *parameter* of *function* may have."""
        key = (function, parameter)
        if key not in self._kinds:
            root = self._schemas.get(function)
            properties = root.get("properties") if isinstance(root, dict) else None
            schema = properties.get(parameter) if isinstance(properties, dict) else None
            self._kinds[key] = _kinds_of(schema, root, _MOST_REFERENCES)
        return self._kinds[key]


def _kinds_of(schema: Any, root: Any, references: int) -> Kinds:
    if not isinstance(schema, dict) or references < 0:
        return _UNKNOWN
    if "$ref" in schema:
        return _kinds_of(_referred(schema["$ref"], root), root, references - 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(kind_of, values))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            parts = [_kinds_of(part, root, references - 1) for part in schema[key]]
            if key == "allOf":
                return next((part for part in parts if part), _UNKNOWN)
            return _UNKNOWN.union(*parts) if all(parts) else _UNKNOWN
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else _UNKNOWN


def _referred(reference: Any, root: Any) -> Any:
    """Return the part of *root* that a reference such as ``#/$defs/City`` names."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        part = part.get(step) if isinstance(part, dict) else None
    return part


def kind_of(value: Any) -> str:
    """Return the JSON type of *value*; a whole number is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"
