"""What a parameter of a tool call that was written as plain text means, as JSON. Pure.

Formats that are not JSON write a string as it is and all else as JSON (or as Python writes it), so
the function's schema decides which of the two a text is.
"""

import json
from typing import Any

from zlm.tokenizer.tools_schemas import STRING, Kinds, kind_of
from zlm.tokenizer.tools_written import python_json


def written_json(text: str, kinds: Kinds) -> str:
    """Return the JSON of a parameter that was written as *text* and may have any of *kinds*.

    What is none of the other types is a string, whatever the schema says: the client is told what
    the model wrote.
    """
    if kinds != STRING:
        bare = text.strip()
        said = _as_json(bare, kinds) or _as_python(bare, kinds)
        if said is not None:
            return said
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str, kinds: Kinds) -> str | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text if _fits(value, kinds) else None


def _as_python(text: str, kinds: Kinds) -> str | None:
    """Return the JSON of a Python literal: some templates write calls with ``str``."""
    said = python_json(text)
    return None if said is None else _as_json(said, kinds)


def _fits(value: Any, kinds: Kinds) -> bool:
    """Tell whether *value*, which is no string, may be what was meant."""
    kind = kind_of(value)
    if kind == "string":
        return False  # its quotes are part of the text
    return not kinds or kind in kinds or (kind == "integer" and "number" in kinds)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
