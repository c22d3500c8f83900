"""What a user of instructor writes: an object from a model, whole and as it grows.

A program of its own, since instructor wants an older openai-python than the other tests have: an
interpreter that has instructor runs ``instructor_program.py BASE_URL``. It prints one JSON
document, ``{mode: {"whole": object, "partials": [object, ...], "asynchronous": object}}``.
"""

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import pydantic

MODES = ("JSON_SCHEMA", "TOOLS")


class Person(pydantic.BaseModel):
    """A person, and nothing else: a small model goes on for ever if it may."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    mood: Literal["glad", "müde"]


ASKED: dict[str, Any] = {
    "model": "smol",
    "messages": [{"role": "user", "content": "Ann is 34 years old and glad."}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}


def client_for(mode: str, base_url: str, make: type) -> Any:
    """Return instructor's client around openai-python's class *make*."""
    import instructor

    plain = make(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(plain, mode=instructor.Mode[mode])


async def ask(mode: str, base_url: str) -> dict[str, Any]:
    """Return what instructor makes of the answers in one mode; it validates them itself."""
    completions = client_for(mode, base_url, openai.OpenAI).chat.completions
    whole = completions.create(response_model=Person, **ASKED)
    partials = list(completions.create_partial(response_model=Person, **ASKED))
    later = client_for(mode, base_url, openai.AsyncOpenAI)
    asynchronous = await later.chat.completions.create(response_model=Person, **ASKED)
    assert isinstance(whole, Person) and isinstance(asynchronous, Person)
    return {
        "whole": whole.model_dump(),
        "partials": [partial.model_dump() for partial in partials],
        "asynchronous": asynchronous.model_dump(),
    }


if __name__ == "__main__":
    print(json.dumps({mode: asyncio.run(ask(mode, sys.argv[1])) for mode in MODES}))
