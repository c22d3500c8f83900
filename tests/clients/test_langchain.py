"""LangChain's OpenAI chat model (and its completion model) pointed at zlm."""

from collections.abc import Callable
from typing import Any

import pydantic
import pytest

langchain_openai = pytest.importorskip("langchain_openai", reason="needs langchain-openai")

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402

QUESTION = "What is the capital of France? Answer in one word."


@pytest.fixture
def chat(base_url: str) -> Callable[..., Any]:
    """Make the chat model with *options* besides where it is."""

    def make(**options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 24, "max_retries": 0, **options}
        return langchain_openai.ChatOpenAI(
            model="smol", base_url=base_url, api_key="none", **options
        )

    return make


@pytest.fixture
def text(raw: Any) -> str:
    content: str = raw["choices"][0]["message"]["content"]
    return content


def test_invoke_with_usage_and_why_it_ended(chat: Callable[..., Any], raw: Any, text: str) -> None:
    answer = chat().invoke(QUESTION)
    assert answer.content == text
    assert answer.usage_metadata["input_tokens"] == raw["usage"]["prompt_tokens"]
    assert answer.usage_metadata["output_tokens"] == raw["usage"]["completion_tokens"]
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "smol"


async def test_streams_join_to_the_whole(chat: Callable[..., Any], raw: Any, text: str) -> None:
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == text and len(chunks) > 2
    assert whole.usage_metadata["output_tokens"] == raw["usage"]["completion_tokens"]
    parts = [chunk.content async for chunk in chat().astream(QUESTION)]
    assert "".join(parts) == text


def test_a_batch_runs_together(chat: Callable[..., Any]) -> None:
    questions = [f"Say the number {number}." for number in range(3)]
    alone = [chat(max_tokens=12).invoke(question).content for question in questions]
    assert [answer.content for answer in chat(max_tokens=12).batch(questions)] == alone


def test_n_stop_and_logprobs(chat: Callable[..., Any], text: str) -> None:
    generated = chat(n=3, temperature=1.0, seed=5).generate([[HumanMessage(QUESTION)]])
    assert len(generated.generations[0]) == 3
    cut = text[3:6]
    stopped = chat().invoke(QUESTION, stop=[cut])
    assert stopped.content == text[: text.index(cut)]
    answer = chat().bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = answer.response_metadata["logprobs"]["content"]
    assert len(entries) == answer.usage_metadata["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_the_completion_model(base_url: str, server: Any) -> None:
    prompt = "The capital of France is"
    model = langchain_openai.OpenAI(
        model="smol", base_url=base_url, api_key="none", temperature=0, max_tokens=8, max_retries=0
    )
    expected = server.complete(prompt, max_tokens=8).text
    assert model.invoke(prompt) == expected
    assert "".join(model.stream(prompt)) == expected


@tool
def weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"It rains in {city}."


def test_a_tool_and_its_answer(chat: Callable[..., Any]) -> None:
    """A forced call, whole and streamed, and its result sent back."""
    model = chat(max_tokens=100)
    forced = model.bind_tools(
        [weather], tool_choice="required", parallel_tool_calls=False, strict=True
    )
    question = HumanMessage("How is the weather in Oslo?")
    called = forced.invoke([question])
    (call,) = called.tool_calls
    assert call["name"] == "weather" and isinstance(call["args"]["city"], str)
    whole = None
    for chunk in forced.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("weather", call["args"])]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    final = model.bind_tools([weather], tool_choice="none").invoke([question, called, result])
    assert isinstance(final, AIMessage) and final.content and not final.tool_calls


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Callable[..., Any], method: str) -> None:
    model = chat(max_tokens=150).with_structured_output(Person, method=method, strict=True)
    assert isinstance(model.invoke("Ann is 34 years old."), Person)


def test_json_mode(chat: Callable[..., Any]) -> None:
    model = chat(max_tokens=60).with_structured_output(None, method="json_mode")
    assert model.invoke('Repeat: {"name": "Ann"}') == {"name": "Ann"}
