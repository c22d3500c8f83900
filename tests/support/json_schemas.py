"""JSON schemas of varied kinds, made from a seed: what structured output is tried on.

``schemas(count)`` gives as many, family by family in turn: flat and nested objects, arrays and
tuples, enums with non-ASCII text, patterns, bounded numbers, unions, recursion, references and
formats. All of their answers are short, so a small model finishes most of them.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = [
    "name",
    "age",
    "città",
    "größe",
    "naïve",
    "日付",
    "emoji 😀",
    'a"b',
    "tab\t",
    "x-y",
    "ключ",
]
TEXTS = [
    "oui",
    "größer",
    "日本語",
    "😀",
    "line\nbreak",
    'q"uote',
    "back\\slash",
    "",
    "Ελλάδα",
    "no",
]
PATTERNS = ["^[a-z]{2,6}$", "^[0-9]{3}-[0-9]{2}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$", "^é+x?$"]
FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4"]


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return *count* schemas; the same for the same seed."""
    draw = random.Random(seed)
    return [FAMILIES[number % len(FAMILIES)](draw) for number in range(count)]


def _object(properties: Schema, *, required: list[str] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _scalar(draw: random.Random) -> Schema:
    low = draw.randint(-50, 50)
    kinds: list[Schema] = [
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": draw.choice([1, 9.5, 100])},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": draw.randint(1, 12)},
        {"type": "string", "minLength": 2, "maxLength": 8},
        {"const": draw.choice([1, "é", None, True, [1, 2], {"k": "v"}])},
        {"type": "integer", "multipleOf": draw.choice([2, 5, 10]), "minimum": 0, "maximum": 1000},
    ]
    return draw.choice(kinds)


def _flat(draw: random.Random) -> Schema:
    return _object({name: _scalar(draw) for name in draw.sample(WORDS, draw.randint(1, 4))})


def _optional(draw: random.Random) -> Schema:
    names = draw.sample(WORDS, 3)
    return _object({name: _scalar(draw) for name in names}, required=names[:1])


def _nested(draw: random.Random) -> Schema:
    inner = _scalar(draw)
    for depth in range(draw.randint(2, 5)):
        inner = _object({draw.choice(WORDS): inner, f"d{depth}": {"type": "boolean"}})
    return inner


def _enum(draw: random.Random) -> Schema:
    values = draw.sample([*TEXTS, 1, 2.5, None, True, ["é"], {"a": 1}], draw.randint(1, 6))
    return _object({draw.choice(WORDS): {"enum": values}})


def _pattern(draw: random.Random) -> Schema:
    return _object({w: {"type": "string", "pattern": draw.choice(PATTERNS)} for w in WORDS[:2]})


def _format(draw: random.Random) -> Schema:
    return _object({"when": {"type": "string", "format": draw.choice(FORMATS)}})


def _array(draw: random.Random) -> Schema:
    least = draw.randint(0, 2)
    limits = {"minItems": least, "maxItems": least + draw.randint(0, 3)}
    return {"type": "array", "items": _scalar(draw), **limits}


def _tuple(draw: random.Random) -> Schema:
    items = [_scalar(draw) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _objects_in_array(draw: random.Random) -> Schema:
    return {"type": "array", "items": _flat(draw), "minItems": 1, "maxItems": 2}


def _union(draw: random.Random) -> Schema:
    return {"anyOf": [_flat(draw), _scalar(draw), _array(draw)]}


def _types(draw: random.Random) -> Schema:
    return _object({draw.choice(WORDS): {"type": ["integer", "null", "boolean"]}})


def _tagged_union(draw: random.Random) -> Schema:
    cat = _object(
        {"kind": {"const": "cat"}, "lives": {"type": "integer", "maximum": 9, "minimum": 0}}
    )
    dog = _object({"kind": {"const": "dog"}, "name": {"type": "string", "maxLength": 8}})
    return {"oneOf": draw.sample([cat, dog], 2)}


def _recursive(draw: random.Random) -> Schema:
    node = _object(
        {
            "value": _scalar(draw),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        required=["value"],
    )
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _linked(draw: random.Random) -> Schema:
    next_one = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    return _object({"head": _scalar(draw), "next": next_one})


def _references(draw: random.Random) -> Schema:
    point = _object({"x": {"type": "integer"}, "y": {"type": "integer"}})
    shared = {"$defs": {"point": point}}
    return shared | _object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}})


def _all_of(draw: random.Random) -> Schema:
    low = draw.randint(0, 50)
    limits = [{"type": "integer", "minimum": low}, {"maximum": low + 20}]
    return _object({"n": {"allOf": limits}})


def _map(draw: random.Random) -> Schema:
    value = {"type": "integer", "minimum": 0, "maximum": 9}
    return {
        "type": "object",
        "patternProperties": {"^k[0-9]$": value},
        "additionalProperties": False,
    }


FAMILIES: list[Callable[[random.Random], Schema]] = [
    _flat, _optional, _nested, _enum, _pattern, _format, _array, _tuple, _objects_in_array, _union,
    _types, _tagged_union, _recursive, _linked, _references, _all_of, _map, _scalar, _nested, _flat,
]  # fmt: skip
