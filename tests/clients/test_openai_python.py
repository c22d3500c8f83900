"""openai-python as its users write it; tests/e2e/test_openai_client.py has the details."""

import re
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


def test_the_readme_snippet_as_it_stands(
    base_url: str, capsys: pytest.CaptureFixture[str], server: Any
) -> None:
    """Run verbatim but for the port, which is the test server's."""
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (snippet,) = [each for each in snippets if "from openai import" in each]
    assert "http://127.0.0.1:8000/v1" in snippet
    exec(snippet.replace("http://127.0.0.1:8000/v1", base_url), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip(), "what it says is sampled, and may be short"


async def test_the_asynchronous_client(base_url: str, raw: Any, question: Any) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        fields = {"model": "smol", "messages": question, "temperature": 0, "max_tokens": 24}
        answer = await client.chat.completions.create(**fields)
        assert answer.choices[0].message.content == raw["choices"][0]["message"]["content"]
        stream = await client.chat.completions.create(**fields, stream=True)
        parts = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(part or "" for part in parts) == answer.choices[0].message.content


def test_the_stream_helper(client: openai.OpenAI, raw: Any, question: Any) -> None:
    """``stream()`` accumulates events by itself and checks them against its types."""
    with client.chat.completions.stream(
        model="smol", messages=question, temperature=0, max_tokens=24, logprobs=True
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    text = raw["choices"][0]["message"]["content"]
    assert "".join(deltas) == final.choices[0].message.content == text
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None and final.choices[0].logprobs.content
    assert "".join(entry.token for entry in final.choices[0].logprobs.content).startswith(text)


def test_extra_body_and_the_raw_response(client: openai.OpenAI, question: Any) -> None:
    response = client.chat.completions.with_raw_response.create(
        model="smol",
        messages=question,
        max_tokens=8,
        extra_body={"top_k": 1, "return_token_ids": True},
        extra_headers={"X-Request-Id": "mine-7"},
    )
    assert response.headers["x-request-id"] == "mine-7"
    assert response.parse().choices[0].to_dict()["token_ids"]


def test_an_answer_goes_back_as_it_came(client: openai.OpenAI, question: Any) -> None:
    """With all the null fields that the client's type puts into it."""
    fields: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 24}
    first = client.chat.completions.create(messages=question, **fields)
    again = {"role": "user", "content": "And of Italy?"}
    message = first.choices[0].message
    plain = {"role": "assistant", "content": message.content}
    answers = [
        client.chat.completions.create(messages=[*question, turn, again], **fields)
        for turn in (message, message.model_dump(), plain)
    ]
    assert {answer.choices[0].message.content for answer in answers} == {
        answers[0].choices[0].message.content
    }
    assert len({answer.usage.prompt_tokens for answer in answers if answer.usage}) == 1


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=99_999_999)


def test_parse_into_a_model(client: openai.OpenAI) -> None:
    prompt = [{"role": "user", "content": "Describe Paris as JSON."}]
    answer = client.chat.completions.parse(
        model="smol", messages=prompt, temperature=0, max_tokens=120, response_format=City
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City) and answer.choices[0].finish_reason == "stop"


def test_a_pydantic_tool(client: openai.OpenAI) -> None:
    """The strict tool that the package makes of a model, called because it must be."""
    answer = client.chat.completions.parse(
        model="smol",
        messages=[{"role": "user", "content": "Look up Paris."}],
        temperature=0,
        max_tokens=120,
        tools=[openai.pydantic_function_tool(City, name="look_up")],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].function.name == "look_up"
    assert isinstance(calls[0].function.parsed_arguments, City)
    assert answer.choices[0].finish_reason == "tool_calls"
