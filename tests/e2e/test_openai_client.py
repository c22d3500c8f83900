"""The official client against a real server: the shapes and values it relies on."""

from typing import Any

import openai
import pytest

MODEL = "smol"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=24
    )
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None and usage.completion_tokens > 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_streamed_chat_equals_the_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**fields, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            **fields, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(each.delta.content or "" for each in deltas)
    assert text == whole.choices[0].message.content
    assert [each.delta.role for each in deltas if each.delta.role] == ["assistant"]
    assert deltas[0].delta.role == "assistant"
    assert [each.finish_reason for each in deltas if each.finish_reason] == ["stop"]
    assert deltas[-1].finish_reason == "stop"
    assert not chunks[-1].choices and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_n_with_a_seed_gives_three_reproducible_answers(client: openai.OpenAI) -> None:
    def texts(stream: bool) -> list[str]:
        fields: dict[str, Any] = {
            "model": MODEL,
            "prompt": "My favourite animal is",
            "n": 3,
            "seed": 11,
            "temperature": 1.0,
            "max_tokens": 12,
        }
        if not stream:
            choices = client.completions.create(**fields).choices
            assert [choice.index for choice in choices] == [0, 1, 2]
            return [choice.text for choice in choices]
        joined = ["", "", ""]
        for chunk in client.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                joined[choice.index] += choice.text
        return joined

    first = texts(stream=False)
    assert len(set(first)) == 3
    assert texts(stream=False) == first
    assert texts(stream=True) == first


def test_another_seed_gives_another_answer(client: openai.OpenAI) -> None:
    answers = {
        client.completions.create(
            model=MODEL, prompt="The best thing about", seed=seed, temperature=1.0, max_tokens=16
        ).choices[0].text
        for seed in (1, 2, 3)
    }  # fmt: skip
    assert len(answers) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_stop_string_is_left_out(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "prompt": "1, 2, 3, 4, 5, 6, 7,",
        "temperature": 0,
        "max_tokens": 32,
        "stop": ["11, 1"],
    }
    if stream:
        chunks = list(client.completions.create(**fields, stream=True))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        finish = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    else:
        choice = client.completions.create(**fields).choices[0]
        text, finish = choice.text, [choice.finish_reason]
    assert text == " 8, 9, 10, "
    assert finish == ["stop"]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and values[0] <= 0
        assert entry.token == entry.top_logprobs[0].token  # greedy took the likeliest
        assert bytes(entry.bytes or []).decode() == entry.token


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    choice, usage = answer.choices[0], answer.usage
    assert usage is not None and choice.logprobs is not None
    tokens, values = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    offsets = choice.logprobs.text_offset or []
    assert len(tokens) == len(values) == len(offsets) == usage.total_tokens
    assert "".join(tokens) == choice.text and choice.text.startswith(prompt)
    assert values[0] is None and all(value is not None and value <= 0 for value in values[1:])
    assert offsets[0] == 0
    ends = [start + len(token) for start, token in zip(offsets, tokens, strict=True)]
    assert ends[:-1] == offsets[1:]


def test_prompts_of_every_shape(client: openai.OpenAI) -> None:
    prompts = ["The sun is", "Two plus two is"]
    texts = client.completions.create(model=MODEL, prompt=prompts, temperature=0, n=1)
    assert [choice.index for choice in texts.choices] == [0, 1]
    base = str(client.base_url).removesuffix("v1/")
    ids = [
        client.post(f"{base}tokenize", body={"model": MODEL, "prompt": p}, cast_to=dict[str, Any])[
            "tokens"
        ]
        for p in prompts
    ]
    by_ids = client.completions.create(model=MODEL, prompt=ids, temperature=0)
    assert [c.text for c in by_ids.choices] == [c.text for c in texts.choices]
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == sum(map(len, ids))
    one = client.completions.create(model=MODEL, prompt=ids[1], temperature=0, echo=True)
    assert one.choices[0].text == prompts[1] + texts.choices[1].text


def test_errors_have_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="x")
    assert missing.value.code == "model_not_found" and "smol" in missing.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert bad.value.param == "temperature"


def test_models(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {MODEL, "smollm2"}
    assert models[MODEL].owned_by == "zlm"
    assert client.models.retrieve("smollm2").id == "smollm2"
    answer = client.completions.create(model="smollm2", prompt="x", max_tokens=1)
    assert answer.model == "smollm2"
