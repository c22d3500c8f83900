"""Structured output over HTTP on a real model: whatever it says, what it finishes fits."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from json_schemas import schemas

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Every level doubles: text of 2 KB that stands for 2**40 schemas.
BOMB = {
    "$defs": {
        f"d{level}": {
            "type": "object",
            "properties": {
                name: {"$ref": f"#/$defs/d{level + 1}"} if level < 40 else {"type": "null"}
                for name in "ab"
            },
            "required": ["a", "b"],
        }
        for level in range(41)
    },
    "$ref": "#/$defs/d0",
}


def nested(levels: int) -> str:
    """Return a schema of objects in objects, so many deep, as text."""
    return '{"properties": {"a": ' * levels + "true" + "}}" * levels


def as_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **fields}}


def check(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_forty_schemas_at_temperature_one(server: Any) -> None:
    """CASES 76: "stop" is whole and valid, "length" is cut; most of these answers finish."""
    asked = schemas(40)

    def ask(number: int) -> Any:
        fields = {"temperature": 1, "seed": number, "max_tokens": 80}
        return server.chat("Fill it in.", response_format=as_format(asked[number]), **fields)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(len(asked))))
    finished = 0
    for schema, answer in zip(asked, answers, strict=True):
        assert answer.status == 200, (schema, answer.body)
        reason = answer.json["choices"][0]["finish_reason"]
        assert reason in ("stop", "length")
        if reason == "stop":
            finished += 1
            check(schema, answer.text)
    assert finished >= 28


def test_json_object(server: Any) -> None:
    fields = {"temperature": 1, "seed": 1, "max_tokens": 60, "n": 4}
    answer = server.chat("Describe Bob.", response_format={"type": "json_object"}, **fields)
    for choice in answer.json["choices"]:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_streamed_text_is_the_same(server: Any) -> None:
    """Also a choice of characters that span tokens (CASES 1)."""
    for form in (
        {"json": PERSON},
        {"choice": ["😀 ключ größe 日本", "😀 no"]},
        {"regex": "é{3,5}x"},
    ):
        fields = {"structured_outputs": form, "temperature": 1, "seed": 3, "max_tokens": 60}
        whole = server.chat("Go.", **fields)
        streamed = server.chat("Go.", stream=True, **fields)
        assert streamed.streamed_text == whole.text
        assert "�" not in whole.text
        reasons = [c["finish_reason"] for e in streamed.events for c in e["choices"]]
        assert reasons[-1] == whole.json["choices"][0]["finish_reason"] == "stop"


def test_every_form_and_n(server: Any) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["red", "blue", "reddish"]}, "red|blue|reddish"),
        ({"grammar": 'start: "x" "y"~2 | "z"'}, "xyy|z"),
        ({"grammar": 'root ::= "p" ("q" | "r")'}, "p[qr]"),
    ]
    for form, pattern in forms:
        answer = server.complete("Say:", structured_outputs=form, n=3, temperature=1, seed=1)
        choices = answer.json["choices"]
        assert len(choices) == 3
        for choice in choices:
            assert re.fullmatch(pattern, choice["text"]), choice
            assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None


def test_limits_and_stop_strings(server: Any) -> None:
    form = {"regex": "[a-z]{30}"}
    cut = server.complete("Say:", structured_outputs=form, max_tokens=2)
    assert cut.json["choices"][0]["finish_reason"] == "length"
    whole = server.complete("Say:", structured_outputs=form, max_tokens=40)
    assert whole.json["choices"][0]["finish_reason"] == "stop" and len(whole.text) == 30
    stop = whole.text[4:7]
    stopped = server.complete("Say:", structured_outputs=form, max_tokens=40, stop=[stop])
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.json["choices"][0]["stop_reason"] == stop


def test_ends_are_held_back_by_min_tokens_and_ignore_eos(server: Any) -> None:
    form = {"regex": "(no )+"}
    for fields in ({"min_tokens": 20}, {"ignore_eos": True}):
        answer = server.complete("No?", structured_outputs=form, max_tokens=24, **fields)
        assert answer.json["usage"]["completion_tokens"] >= 20
        assert re.fullmatch("(no )*(n|no)?", answer.text)
    word = server.complete("No?", structured_outputs={"regex": "no"}, min_tokens=9, ignore_eos=True)
    assert word.text == "no" and word.json["choices"][0]["finish_reason"] == "stop"


def test_the_same_answer_from_the_prefix_cache(server: Any) -> None:
    prompt = "A long prompt that fills some blocks of the cache. " * 8
    fields = {"structured_outputs": {"json": PERSON}, "max_tokens": 60}
    first, second = server.complete(prompt, **fields), server.complete(prompt, **fields)
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first.text == second.text
    check(PERSON, first.text)


def test_logprobs_and_token_limits_beside_a_grammar(server: Any) -> None:
    form = {"choice": ["yes", "no"]}
    answer = server.chat("Yes?", structured_outputs=form, logprobs=True, top_logprobs=3)
    entries = answer.json["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer.text
    ids = server.request("POST", "/tokenize", {"model": "smol", "prompt": "zebra"}).json["tokens"]
    nothing = server.complete("Yes?", structured_outputs=form, allowed_token_ids=ids[:1])
    assert nothing.status == 400 and "grammar" in nothing.json["error"]["message"]
    server.assert_good()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": as_format({"type": "not-a-type"})}, "response_format", "not-a-type"),
        ({"response_format": as_format({"$ref": "#/$defs/x"})}, "response_format", "/$defs/x"),
        ({"response_format": as_format({"$ref": "#"})}, "response_format", "accepts nothing"),
        ({"response_format": as_format(False)}, "response_format", "false"),
        ({"structured_outputs": {"json": nested(1001)}}, "structured_outputs", "recursion"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": as_format({"not": {}})}, "response_format", "not"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "x"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
    ],
)
def test_a_bad_or_hopeless_form_is_refused_before_scheduling(
    server: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    """CASES 75 and 78: 400 with the compiler's words, streamed or not, and soon."""
    for stream in (False, True):
        began = time.monotonic()
        answer = server.chat("Go.", stream=stream, **fields)
        assert answer.status == 400, answer.body
        error = answer.json["error"]
        assert error["param"] == param and words in error["message"]
        assert time.monotonic() - began < 10  # the first starts the process that compiles
    server.assert_good()


def test_a_bomb_is_over_in_time_and_stalls_nobody(server: Any) -> None:
    """CASES 75: others go on while it is tried."""
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        bomb = pool.submit(server.chat, "Go.", response_format=as_format(BOMB), max_tokens=4)
        server.assert_good()
        answer = bomb.result()
    assert answer.status in (200, 400)
    assert time.monotonic() - began < 30
    server.assert_good()


def test_keywords_are_enforced(server: Any) -> None:
    """CASES 78: patternProperties, multipleOf, lengths and additionalProperties hold."""
    schema = {
        "type": "object",
        "patternProperties": {"^[a-c]$": {"type": "integer", "multipleOf": 7, "maximum": 700}},
        "properties": {"text": {"type": "string", "minLength": 3, "maxLength": 6}},
        "required": ["text"],
        "additionalProperties": False,
    }
    fields = {"temperature": 1, "seed": 1, "max_tokens": 60, "n": 4}
    answer = server.chat("Go.", response_format=as_format(schema), **fields)
    whole = [c for c in answer.json["choices"] if c["finish_reason"] == "stop"]
    assert whole
    for choice in whole:
        check(schema, choice["message"]["content"])


def test_what_cannot_be_enforced_is_ignored_only_where_strict_is_false(server: Any) -> None:
    schema = PERSON | {"not": {"required": ["height"]}}
    assert server.chat("Go.", response_format=as_format(schema, strict=True)).status == 400
    assert server.chat("Go.", response_format=as_format(schema)).status == 400
    lenient = as_format(schema, strict=False)
    answer = server.chat("Go.", response_format=lenient, max_tokens=80)
    assert answer.status == 200 and answer.text.startswith("{")


def test_the_openai_clients_way(server: Any) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Who is Bob?"}],
        response_format=as_format(PERSON, strict=True),
        max_tokens=80,
        temperature=0,
    )
    assert answer.choices[0].finish_reason == "stop"
    check(PERSON, answer.choices[0].message.content or "")


def test_preempted_answers_still_fit(small_pool: Any) -> None:
    """More sequences than the KV cache holds at once: they are recomputed, the grammar goes on."""
    form = {"regex": "([a-z]{3} ){40}"}
    before = small_pool.metric("vllm:num_preemptions")
    prompts = [
        (f"Words number {k}:", {"structured_outputs": form, "max_tokens": 160}) for k in range(6)
    ]
    for answer in small_pool.together(prompts):
        assert answer.status == 200
        if answer.json["choices"][0]["finish_reason"] == "stop":
            assert re.fullmatch(form["regex"], answer.text)
    assert small_pool.metric("vllm:num_preemptions") > before
