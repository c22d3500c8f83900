"""Broken and unusable bodies (CASES 86, 88, 42): a 4xx with a JSON error, and life goes on."""

import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ENDPOINTS = [COMPLETIONS, CHAT, "/tokenize", "/detokenize"]

BROKEN = {
    "empty": b"",
    "white space": b" \n",
    "half": b"{",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "lone high surrogate": b'{"prompt": "\\ud83d"}',
    "lone low surrogate": b'{"prompt": "\\udc00x"}',
    "surrogate then text": b'{"prompt": "\\ud83dabcdefgh"}',
    "surrogate in a key": b'{"\\ud800": 1}',
    "list": b"[1]",
    "null": b"null",
    "string": b'"hi"',
    "bom": b'\xef\xbb\xbf{"prompt": "x"}',
    "utf-16": '{"prompt": "x"}'.encode("utf-16"),
    "two objects": b'{"prompt": "x"} {}',
    "nan": b'{"temperature": NaN}',
    "infinity": b'{"temperature": 1e999}',
    "huge int": b'{"n": ' + b"9" * 5000 + b"}",
    "control character": b'{"prompt": "\x00"}',
    "deep": b'{"messages": [{"role": "user", "content": '
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}]}",
    "deep, unfinished": b'{"metadata": ' + b'{"a":' * 100_000,
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_broken_body(house, endpoint, body):
    response = house.post(endpoint, body)
    house.refused(response, 400)
    assert response.error["type"] == "invalid_request_error"
    assert house.commands[-1].prompts == ["x"]  # only the good request after it reached anybody


def test_depth_that_json_allows_is_refused_before_it_is_sent_on(house):
    deep = b'{"messages": [{"role": "user", "content": "x", "metadata": %b1%b}]}'
    for levels in (150, 300):
        body = deep % (b"[" * levels, b"]" * levels)
        message = house.refused(house.post(CHAT, body), 400, "messages[0].metadata")
        assert "100 levels" in message
    assert house.post(CHAT, deep % (b"[" * 90, b"]" * 90)).status == 200


@pytest.mark.parametrize(
    "field", ["response_format", "tool_choice", "chat_template_kwargs", "stream_options", "role"]
)
def test_depth_of_values_that_errors_quote(house, field):
    """The deepest value that JSON decoding lets through is refused like any other."""
    chat = b'{"stream": true, "messages": [{"role": "user", "content": "x"}], "%b": %b}'
    for levels in (200, 500, 900):
        value = b'{"a": ' + b"[" * levels + b"]" * levels + b"}"
        body = chat % (field.encode(), value)
        if field == "role":
            body = b'{"messages": [{"role": %b, "content": "x"}]}' % value
        house.refused(house.post(CHAT, body), 400)


def test_integer_that_no_message_can_carry(house):
    body = {"messages": [{"role": "user", "content": "x", "metadata": 2**70}]}
    assert "64 bits" in house.refused(house.post(CHAT, body), 400, "messages")
    many = {"enum": [2**70]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": many}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": many}}]
    for field, value in (
        ("chat_template_kwargs", {"k": -(2**70)}),
        ("response_format", schema),
        ("structured_outputs", {"json": many}),
        ("tools", tools),
    ):
        said = house.refused(house.chat(**{field: value}), 400, field)
        assert said == f"{field}: integers of more than 64 bits are not taken"
    for path, field, value in (
        (COMPLETIONS, "prompt", [2**70]),
        (COMPLETIONS, "prompt", [[1], [2**70, 3]]),
        (COMPLETIONS, "stop_token_ids", [2**70]),
        ("/detokenize", "tokens", [1, 2**70]),
    ):
        beside = {"prompt": "x"} if path == COMPLETIONS else {}
        said = house.refused(house.post(path, {**beside, field: value}), 400, field)
        assert f"token id {2**70}, which is out of vocabulary: ids of this model are 0 to" in said


@pytest.mark.parametrize(
    "declared",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"],
)
def test_other_content_types_are_415(house, declared):
    response = house.post(COMPLETIONS, {"prompt": "x"}, {"Content-Type": declared})
    assert "application/json" in house.refused(response, 415)


@pytest.mark.parametrize(
    "declared", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
def test_json_content_types(house, declared):
    response = house.post(COMPLETIONS, {"prompt": "x"}, {"Content-Type": declared})
    assert response.status == 200


def test_absent_content_type_is_json(house):
    client = house.client()
    client.send(
        b'POST /v1/completions HTTP/1.1\r\nHost: z\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}'
    )
    house.loop.turn()
    assert client.responses()[0].status == 200


def test_compressed_body_is_415(house):
    response = house.post(COMPLETIONS, b"\x1f\x8b", {"Content-Encoding": "gzip"})
    assert "gzip" in house.refused(response, 415)


def test_unknown_field_names_the_nearest(house):
    message = house.refused(house.complete(max_token=5), 400, "max_token")
    assert "'max_tokens'" in message
    message = house.refused(house.chat(temprature=1), 400, "temprature")
    assert "'temperature'" in message
    message = house.refused(house.post("/tokenize", {"promt": "x"}), 400, "promt")
    assert "'prompt'" in message
    house.refused(house.post("/detokenize", {"ids": [1]}), 400, "ids")


def test_extra_body_as_a_key_is_explained(house):
    message = house.refused(house.chat(extra_body={"top_k": 1}), 400, "extra_body")
    assert "top level" in message


def test_echo_of_a_long_name_is_cut(house):
    message = house.refused(house.complete(**{"a" * 100_000: 1}), 400)
    assert len(message) < 500


def test_unknown_fields_may_be_ignored(make_house):
    house = make_house(unknown_fields="ignore")
    assert house.complete(max_token=5, stream=True, stream_options={"x": 1}).status == 200
    assert house.chat(extra_body={"top_k": 1}).status == 200
    house.refused(house.complete(max_tokens="5"), 400, "max_tokens")
    house.refused(house.complete(guided_json={}), 400, "guided_json")


def test_unknown_keys_inside_messages_are_passed_on_if_asked(make_house):
    house = make_house(unknown_fields="ignore")
    message = {"role": "user", "content": "x", "my_key": {"a": [1, 2.5, None, True]}}
    assert house.post(CHAT, {"messages": [message]}).status == 200
    assert house.generated().chat.messages == [message]


WRONG_TYPES = [
    ("max_tokens", "5"),
    ("max_tokens", 5.5),
    ("max_tokens", True),
    ("n", False),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", 1.5),
    ("stream", "true"),
    ("stream", 1),
    ("stop", 5),
    ("stop", ["a", 1]),
    ("seed", 1.5),
    ("seed", "7"),
    ("logit_bias", [1]),
    ("logit_bias", {"1": "x"}),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [True]),
    ("allowed_token_ids", 5),
    ("user", 5),
    ("metadata", "x"),
    ("stream_options", True),
    ("ignore_eos", 1),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
def test_known_field_of_a_wrong_type(house, field, value):
    assert field in house.refused(house.complete(**{field: value}), 400, field)
    assert field in house.refused(house.chat(**{field: value}), 400, field)


def test_null_is_absent(house):
    from zlm.frontend.openai.chat import ChatRequest
    from zlm.frontend.openai.completions import CompletionRequest

    fields = dict.fromkeys(CompletionRequest.__struct_fields__)
    assert house.post(COMPLETIONS, fields | {"prompt": "x"}).status == 200
    explicit = house.generated().params
    assert house.complete().status == 200
    assert house.generated().params == explicit
    fields = dict.fromkeys(ChatRequest.__struct_fields__)
    messages = [{"role": "user", "content": "x"}]
    assert house.post(CHAT, fields | {"messages": messages}).status == 200


def test_duplicate_keys_take_the_last(house):
    assert house.post(COMPLETIONS, b'{"prompt": "a", "prompt": "b"}').status == 200
    assert house.generated().prompts == ["b"]


def test_large_body_below_the_limit_is_passed_on(house):
    text = "x" * 10_000_000
    assert house.post(COMPLETIONS, {"prompt": text}).status == 200
    assert len(house.generated().prompts[0]) == 10_000_000


def test_body_over_the_limit(house):
    house.refused(house.post(COMPLETIONS, b" " * (32 * 1024 * 1024 + 1)), 413)
