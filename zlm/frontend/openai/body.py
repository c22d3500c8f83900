"""From a request body to a typed struct, with errors that name the field."""

import difflib
import re
from typing import Any, Generic, TypeVar

import msgspec

from zlm.errors import BadRequest, clip

T = TypeVar("T", bound=msgspec.Struct)

MAX_DEPTH = 100  # of JSON values that are passed on as they are

_TYPES = {
    "array": "a list",
    "object": "an object",
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
_EXPECTED = re.compile(r"Expected `([a-z| ]+)`(?:, got `([a-z]+)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_PATH = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes the body of one endpoint into *struct*."""

    def __init__(self, struct: type[T]) -> None:
        name = f"Strict{struct.__name__}"
        strict = msgspec.defstruct(name, [], bases=(struct,), forbid_unknown_fields=True)
        self._lenient = msgspec.json.Decoder(struct)
        self._strict: msgspec.json.Decoder[T] = msgspec.json.Decoder(strict)
        self._fields = struct.__struct_fields__

    def decode(self, body: bytes | bytearray, unknown_fields: str) -> T:
        """Return *body* as the struct; *unknown_fields* is ``reject`` or ``ignore``.

        Raises BadRequest, naming the field where there is one.
        """
        decoder = self._lenient if unknown_fields == "ignore" else self._strict
        if not body or body.isspace():
            raise BadRequest("the body is empty, a JSON object is needed")
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._invalid(str(error)) from None
        except msgspec.DecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise BadRequest("the body is not usable: JSON nested too deeply") from None

    def _invalid(self, message: str) -> BadRequest:
        """Return msgspec's complaint in our words: which field, what is wrong with it."""
        unknown = _UNKNOWN.fullmatch(message)
        if unknown is not None:
            return self._unknown_field(unknown.group(1))
        path, problem = located(message)
        if not path:
            return BadRequest(f"the body must be a JSON object: {clip(problem)}")
        field = re.split(r"[.\[]", path, maxsplit=1)[0]
        return BadRequest(f"{clip(path)}: {clip(problem)}", param=clip(field) or None)

    def _unknown_field(self, name: str) -> BadRequest:
        message = f"unknown field {clip(name)!r}"
        if name == "extra_body":
            message += ": it is an argument of the Python client; its fields go at the top level"
        elif near := difflib.get_close_matches(name[:64], self._fields, n=1):
            message += f", did you mean {near[0]!r}?"
        return BadRequest(message, param=clip(name), code="unknown_field")


def located(message: str) -> tuple[str, str]:
    """Return where msgspec's complaint is (empty: the value itself) and what it says, in words."""
    found = _PATH.fullmatch(message)
    return ("", _in_words(message)) if found is None else (found[2], _in_words(found[1]))


def _in_words(problem: str) -> str:
    """Return a complaint about a type without msgspec's notation, any other as it is."""
    match = _EXPECTED.fullmatch(problem)
    if match is None:
        return problem
    wanted = [_TYPES.get(name, name) for name in match[1].split(" | ") if name != "null"]
    got = f", got {_TYPES.get(match[2], match[2])}" if match[2] else ""
    return f"expected {' or '.join(wanted or ['null'])}{got}"


def mistyped(where: str, wanted: str, value: Any) -> BadRequest:
    """Return the error for a *value* that stands at *where* and is not *wanted*, or is missing."""
    if value is None:
        return BadRequest(f"{where} is required", param=where)
    return BadRequest(f"{where} must be {wanted}, got {clip(repr(value))}", param=where)


def check_depth(value: Any, param: str, limit: int = MAX_DEPTH) -> None:
    """Raise BadRequest if *value*, which is passed on as it is, is nested deeper than *limit*."""
    level = [value]
    for _ in range(limit):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = [item for item in below if isinstance(item, (dict, list))]
        if not level:
            return
    raise BadRequest(f"{param} is nested deeper than {limit} levels", param=param)
