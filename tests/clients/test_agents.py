"""The tool loop of openai-agents over chat completions."""

from typing import Any

import openai
import pydantic
import pytest

agents = pytest.importorskip("agents", reason="needs openai-agents")


@pytest.fixture
def model(base_url: str) -> Any:
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    return agents.OpenAIChatCompletionsModel(model="smol", openai_client=client)


def settings(**options: Any) -> Any:
    return agents.ModelSettings(temperature=0, max_tokens=40, **options)


def weather_agent(model: Any, called: list[str], **options: Any) -> Any:
    """An agent with one tool, which it has until it is called: so the loop ends."""

    @agents.function_tool(is_enabled=lambda *_: not called)  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        called.append(city)
        return f"It rains in {city}."

    return agents.Agent(
        name="Forecaster",
        instructions="Answer questions about the weather.",
        model=model,
        model_settings=settings(**options),
        tools=[weather],
    )


async def test_an_agent_without_tools(model: Any, server: Any) -> None:
    agent = agents.Agent(
        name="Guide",
        instructions="Be brief.",
        model=model,
        model_settings=settings(include_usage=True),
    )
    result = await agents.Runner.run(agent, "What is the capital of France?")
    assert "Paris" in result.final_output
    streamed = agents.Runner.run_streamed(agent, "What is the capital of France?")
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == streamed.final_output == result.final_output
    for each in (result, streamed):
        usage = each.context_wrapper.usage
        assert usage.requests == 1 and usage.output_tokens > 1 and usage.input_tokens > 10


async def test_the_tool_loop(model: Any) -> None:
    """A call that the model must make, run here, and its result sent back for the answer."""
    called: list[str] = []
    agent = weather_agent(model, called, tool_choice="required", parallel_tool_calls=False)
    result = await agents.Runner.run(agent, "How is the weather in Oslo?", max_turns=4)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert [result.new_items[1].output] == [f"It rains in {city}." for city in called]
    assert result.final_output


async def test_the_tool_loop_streamed(model: Any) -> None:
    called: list[str] = []
    agent = weather_agent(model, called, tool_choice="required", parallel_tool_calls=False)
    streamed = agents.Runner.run_streamed(agent, "How is the weather in Oslo?", max_turns=4)
    names = [event.name async for event in streamed.stream_events() if hasattr(event, "name")]
    assert names == ["tool_called", "tool_output", "message_output_created"]
    assert len(called) == 1 and streamed.final_output


class Answer(pydantic.BaseModel):
    """What the agent answers with."""

    city: str = pydantic.Field(max_length=20)
    rainy: bool


async def test_a_typed_answer(model: Any) -> None:
    agent = agents.Agent(
        name="Typed", instructions="", model=model, model_settings=settings(), output_type=Answer
    )
    result = await agents.Runner.run(agent, "It rains in Oslo.")
    assert isinstance(result.final_output, Answer)


async def test_what_is_refused_reaches_the_program(model: Any) -> None:
    """As openai-python's own type."""
    agent = agents.Agent(
        name="Hot", model=model, model_settings=agents.ModelSettings(temperature=9)
    )
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await agents.Runner.run(agent, "Hello")
