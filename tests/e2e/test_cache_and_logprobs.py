"""Prefix cache, logprobs, echo and usage over HTTP: CASES 3, 49, 52, 56, 57, 62, 63, 68."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

BLOCK = 16
LONG = "The history of the lighthouse begins with a fire on a hill, which sailors could see. " * 4


def ids(length: int, salt: int = 0) -> list[int]:
    return [(37 * i + 1009 * salt) % 40000 + 100 for i in range(length)]


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_case_49_a_hit_does_not_change_the_answer(server: Any, length: int) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "logprobs": 1, "cache_salt": f"a-{length}"}
    answers = [server.complete(ids(length, length), **fields) for _ in range(3)]
    cold = server.complete(ids(length, length), **{**fields, "cache_salt": f"b-{length}"})
    for answer in (*answers, cold):
        assert answer.text == answers[0].text
        logprobs = answer.json["choices"][0]["logprobs"]["token_logprobs"]
        first = answers[0].json["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs == pytest.approx(first, abs=1e-4)
    cached = [a.json["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (*answers, cold)]
    full_blocks = (length - 1) // BLOCK * BLOCK  # the last prompt token is always recomputed
    assert cached == [0, full_blocks, full_blocks, 0]


def test_case_49_a_shared_prefix_with_different_tails(server: Any) -> None:
    tails = [" It was red.", " It was tall.", " Nobody knew why.", " The end."]
    cold = [server.complete(LONG + t, cache_salt=f"cold{t}", max_tokens=12).text for t in tails]
    warm = [server.complete(LONG + t, cache_salt="shared", max_tokens=12) for t in tails]
    assert [answer.text for answer in warm] == cold
    cached = warm[-1].json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= BLOCK


def test_case_52_prompt_logprobs_with_a_warm_cache(server: Any) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2}
    server.complete(LONG, max_tokens=1)  # warms the cache
    first, second = (server.complete(LONG, **fields).json for _ in range(2))
    tokens = first["choices"][0]["logprobs"]["token_logprobs"]
    assert len(tokens) == first["usage"]["prompt_tokens"] + 2
    assert tokens[0] is None and None not in tokens[1:]
    assert second["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(tokens, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 5, "temperature": 0.01, "top_p": 0.01},
        {"echo": True, "logprobs": 1, "top_k": 1},
        {"logprobs": 5, "allowed_token_ids": [28, 30]},
        {"logprobs": 5, "logit_bias": {"28": -100}},
        {"logprobs": 5, "structured_outputs": {"regex": "[ab]{200}"}},
    ],
    ids=["low-top-p", "echo-top-k", "two-allowed", "bias", "form"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_case_56_every_number_is_finite(server: Any, fields: dict[str, Any], stream: bool) -> None:
    common = {"seed": 1, "ignore_eos": True, "stream": stream}
    answer = server.complete("Roses are red, violets are", **common, **fields)
    assert answer.status == 200, answer.body
    documents = answer.events if stream else [answer.json]  # both refuse NaN and Infinity
    values = [
        value
        for document in documents
        for choice in document["choices"]
        for value in (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    assert len(values) >= 16
    assert all(value is None or -10_000 < value <= 0 for value in values)


def test_case_57_logprobs_do_not_depend_on_sampling(server: Any) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.2, "top_p": 0.0001},
        {"temperature": 1.5, "top_k": 1},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {"28": 1}},
    ]
    tops = []
    for setting in settings:
        answer = server.complete("The capital of France is", max_tokens=1, logprobs=5, **setting)
        tops.append(answer.json["choices"][0]["logprobs"]["top_logprobs"][0])
    for top in tops:
        for token, value in top.items():
            if token in tops[0]:
                assert value == pytest.approx(tops[0][token], abs=1e-4)
    assert len(tops[0]) == 5 and tops[1] == pytest.approx(tops[0], abs=1e-4)


def test_case_62_echo_with_logprobs(server: Any) -> None:
    prompt = "Q: What is the colour of the sky?\nA: blue"
    one = server.complete(prompt, echo=True, logprobs=1, max_tokens=1).json
    none = server.complete(prompt, echo=True, logprobs=1, max_tokens=0).json
    bare = server.complete(prompt, echo=True, max_tokens=1).json
    count = one["usage"]["prompt_tokens"]
    scored, scored_only = one["choices"][0], none["choices"][0]
    assert len(scored["logprobs"]["tokens"]) == count + 1
    assert len(scored_only["logprobs"]["tokens"]) == count
    assert scored_only["text"] == prompt and none["usage"]["completion_tokens"] == 0
    assert scored["text"] == bare["choices"][0]["text"] and scored["text"].startswith(prompt)
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert "".join(scored["logprobs"]["tokens"][:count]) == prompt
    assert scored["logprobs"]["token_logprobs"][1:count] == pytest.approx(
        scored_only["logprobs"]["token_logprobs"][1:], abs=1e-4
    )


@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}], ids=repr)
def test_case_63_usage_in_a_stream(server: Any, options: dict[str, Any] | None) -> None:
    whole = server.complete("Hello there", max_tokens=4).json["usage"]
    fields = {} if options is None else {"stream_options": options}
    events = server.complete("Hello there", max_tokens=4, stream=True, **fields).events
    if options:
        assert events[-1]["choices"] == [] and events[-1]["usage"] == whole
        assert all(event["usage"] is None for event in events[:-1])
    else:
        assert all(event["choices"] and not event.get("usage") for event in events)


def test_case_68_chat_ids_are_the_templates(server: Any, smollm2_path: Path) -> None:
    reference = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    messages = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Wie heißt die Hauptstadt? 🙂"},
    ]
    expected = reference.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    body = {"model": "smol", "messages": messages}
    tokens = server.request("POST", "/tokenize", body).json
    assert tokens["tokens"] == expected and tokens["count"] == len(expected)
    answer = server.request("POST", "/v1/chat/completions", {**body, "max_tokens": 1})
    assert answer.json["usage"]["prompt_tokens"] == len(expected)


def test_streamed_text_equals_the_whole_at_high_temperature(server: Any) -> None:
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 48, "n": 2}
    whole = server.complete("数字と絵文字 🙂:", **fields).json["choices"]
    answer = server.complete("数字と絵文字 🙂:", stream=True, **fields)
    joined = ["", ""]
    for event in answer.events:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    assert joined == [choice["text"] for choice in whole]
