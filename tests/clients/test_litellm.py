"""LiteLLM by its two routes to such a server: ``openai/`` and ``hosted_vllm/``."""

import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="needs litellm")

ROUTES = ["openai/smol", "hosted_vllm/smol"]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(params=ROUTES)
def fields(request: pytest.FixtureRequest, base_url: str, question: Any) -> dict[str, Any]:
    """What every call is made with."""
    return {
        "model": request.param,
        "api_base": base_url,
        "api_key": "none",
        "messages": question,
        "temperature": 0,
        "max_tokens": 24,
        "num_retries": 0,
    }


def test_chat_whole_and_streamed(fields: dict[str, Any], raw: Any) -> None:
    text = raw["choices"][0]["message"]["content"]
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == raw["usage"]["completion_tokens"]
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    joined = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert joined == text
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert [each.completion_tokens for each in usages] == [raw["usage"]["completion_tokens"]]
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


async def test_asynchronous_chat(fields: dict[str, Any], raw: Any) -> None:
    answer = await litellm.acompletion(**fields)
    assert answer.choices[0].message.content == raw["choices"][0]["message"]["content"]


def test_n_stop_and_logprobs(fields: dict[str, Any], raw: Any) -> None:
    text = raw["choices"][0]["message"]["content"]
    several = litellm.completion(**{**fields, "temperature": 1}, n=3, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    cut = text[3:6]
    stopped = litellm.completion(**fields, stop=[cut])
    assert stopped.choices[0].message.content == text[: text.index(cut)]
    answer = litellm.completion(**fields, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs["content"]
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_errors_have_its_types(fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**fields, "temperature": 9})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**fields, "max_tokens": 100_000})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**fields, "model": fields["model"].replace("smol", "nobody")})


def test_text_completion(base_url: str, server: Any) -> None:
    prompt = "The capital of France is"
    answer = litellm.text_completion(
        model="text-completion-openai/smol",
        api_base=base_url,
        api_key="none",
        prompt=prompt,
        temperature=0,
        max_tokens=8,
    )
    assert answer.choices[0].text == server.complete(prompt, max_tokens=8).text


def test_a_required_tool(fields: dict[str, Any]) -> None:
    asked = {**fields, "max_tokens": 100, "tools": [TOOL], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    answer = litellm.completion(**asked)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and answer.choices[0].finish_reason == "tool_calls"
    assert "city" in json.loads(call.function.arguments)  # one route drops additionalProperties
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    (streamed,) = built.choices[0].message.tool_calls
    assert streamed.function.name == "weather"
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


def test_a_json_schema(fields: dict[str, Any]) -> None:
    schema = {"name": "place", "schema": TOOL["function"]["parameters"], "strict": True}  # type: ignore[index]
    answer = litellm.completion(
        **{**fields, "max_tokens": 100},
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}
