"""One row of the table behind /openapi.json, and the errors that rows share. Pure data."""

from dataclasses import dataclass, field
from typing import Any

from zlm.frontend.openai.field_docs import TOKEN_ID

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    name: str
    summary: str
    tag: str
    method: str = "get"
    description: str = ""
    open: bool = False  # asks for no key
    path_parameters: tuple[tuple[str, str], ...] = ()  # name, description
    request: type | None = None
    required: tuple[str, ...] = ()  # fields, in our checks rather than in the type
    alternatives: tuple[str, ...] = ()  # fields, of which exactly one is given
    hidden: tuple[str, ...] = ()  # fields that exist only to be refused by name
    neutral: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # refused but for these
    overrides: dict[str, Json] = field(default_factory=dict)  # field → keywords of its schema
    examples: dict[str, Json] = field(default_factory=dict)
    answer: type | None = None
    answer_description: str = "The answer."
    chunk: type | None = None  # of a stream
    media_type: str | None = None  # of an answer that is not JSON
    errors: tuple[str, ...] = ("408", "431")


ERRORS = {  # status → what it means
    "400": "Malformed, out of range, or too long (code context_length_exceeded).",
    "401": "An API key is needed, or it is none of this server's.",
    "403": "The key does not open this route.",
    "404": "No such path, or no such model (code model_not_found).",
    "405": "The path does not take this method; the header Allow lists those it takes.",
    "408": "The request took too long to arrive.",
    "413": "The body is larger than the server takes.",
    "415": "The body is not declared as JSON.",
    "429": "Over a quota; the header Retry-After says when to try again.",
    "431": "The headers are larger than the server takes.",
    "500": "A fault of the server.",
    "503": "Not ready, overloaded or shutting down; the header Retry-After says when to try again.",
    "504": "The answer was not complete within the time that the request or the server allows.",
}
ON_ANY = ("405", "408", "431", "500")
ON_MODEL = ("404", "503", *ON_ANY)
ON_POST = ("400", "413", "415", "429", "504", *ON_MODEL)
ON_ADMIN = ("400", "401", "403", "413", "415", "503", "504", *ON_ANY)  # with a body

_TOKEN = {"type": "integer", "minimum": 0, "format": TOKEN_ID}
PROMPT: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": _TOKEN},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": _TOKEN},
        },
    ]
}
