"""instructor in the two ways that people use with such servers: JSON schema, and tools."""

from typing import Any, Literal

import openai
import pydantic
import pytest

instructor = pytest.importorskip("instructor", reason="needs instructor")


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


def client_for(mode: str, base_url: str, asynchronous: bool = False) -> Any:
    make = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    plain = make(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(plain, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_an_object(mode: str, base_url: str) -> None:
    person = client_for(mode, base_url).chat.completions.create(response_model=Person, **ASKED)
    assert isinstance(person, Person)


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_an_object_that_grows(mode: str, base_url: str) -> None:
    """Streamed: every partial object is a prefix of the last, which is whole."""
    partials = list(
        client_for(mode, base_url).chat.completions.create_partial(response_model=Person, **ASKED)
    )
    assert len(partials) > 2
    assert Person(**partials[-1].model_dump())
    names = [each.name for each in partials if each.name is not None]
    assert all(names[-1].startswith(name) for name in names)


async def test_an_object_asynchronously(base_url: str) -> None:
    client = client_for("JSON_SCHEMA", base_url, asynchronous=True)
    assert isinstance(await client.chat.completions.create(response_model=Person, **ASKED), Person)
