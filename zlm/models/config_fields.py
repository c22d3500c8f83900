"""Typed reading of JSON configuration: a wrong or missing value is an error that names its key.

Knows nothing of models. ``null`` counts as absent, as in Hugging Face's configuration classes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from zlm.errors import ModelError, clip


class Fields:
    """One JSON object and where it came from. Reads, never changes."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source  # file, and the key within it, for messages

    def has(self, key: str) -> bool:
        """Whether *key* is present with a value."""
        return self.values.get(key) is not None

    def require(self, keys: Iterable[str]) -> None:
        """Raise ModelError that names all of *keys* that have no value."""
        missing = [key for key in keys if not self.has(key)]
        if missing:
            raise ModelError(f"{self.source} lacks {', '.join(missing)}")

    def integer(self, key: str, default: int, *, least: int = 1) -> int:
        """Return the whole number under *key*, at least *least*."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float, *, above: float = 0.0) -> float:
        """Return the number under *key*, greater than *above*."""
        value = self.optional_number(key)
        if value is None:
            return default
        if not value > above:
            raise self.wrong(key, f"a number greater than {above:g}")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return the number under *key*, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return the list of numbers under *key*; it must be there."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and not isinstance(item, bool) for item in value
        ):
            raise self.wrong(key, "a list of numbers")
        return tuple(float(item) for item in value)

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value under *key*."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return the string under *key*."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def names(self, key: str) -> list[str]:
        """Return the list of strings under *key*, empty if it is absent."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return value

    def part(self, key: str) -> "Fields | None":
        """Return the object under *key*, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.source}, {key}")

    def wrong(self, key: str, wanted: str) -> ModelError:
        """Return the error for a value of *key* that is not what is *wanted*."""
        value = self.values.get(key)
        return ModelError(f"{self.source}: {key} must be {wanted}, not {clip(repr(value))}")


def read_fields(path: Path) -> Fields:
    """Return the JSON object in the file *path*. Raises ModelError if it is missing or damaged."""
    try:
        values = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return Fields(values, str(path))


def read_fields_if_there(path: Path) -> Fields:
    """Return the JSON object in *path*, an empty one if there is no such file."""
    return read_fields(path) if path.is_file() else Fields({}, str(path))
