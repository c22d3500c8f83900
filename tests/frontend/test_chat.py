"""POST /v1/chat/completions: messages, fields, shapes of answers (CASES 5, 45, 55, 69, 71)."""

import pytest

from zlm.messages import Deltas, TokenLogprob

PATH = "/v1/chat/completions"


def _ask(house, messages, **fields):
    return house.post(PATH, {"messages": messages, **fields})


def test_answer(house):
    body = house.chat().json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello wörld!", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"]["total_tokens"] == 9


@pytest.mark.parametrize("n", [1, 3])
def test_stream(house, n):
    chunks = house.chat(stream=True, n=n).chunks()
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    for index in range(n):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        deltas = [c["delta"] for c in choices]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in d for d in deltas[1:])
        assert "".join(d.get("content", "") for d in deltas) == "Hello wörld!"
        finishes = [c["finish_reason"] for c in choices]
        assert finishes == [None] * (len(finishes) - 1) + ["stop"]
        assert all(
            d.get("content") or c["finish_reason"] for d, c in zip(deltas, choices, strict=True)
        )


def test_no_empty_chunks(house, make_delta):
    """Held back bytes make deltas without text: nothing is sent for them (CASE 5)."""
    client = house.client()
    house.tokenizer = lambda command: []
    client.request("POST", PATH, {"messages": [{"role": "user", "content": "x"}], "stream": True})
    command = house.generated()
    for tokens, text in enumerate(["", "", "", "😀", "", "b"], start=1):
        house.take(Deltas([make_delta(command, 0, text, tokens)]))
        house.loop.turn()
    house.take(Deltas([make_delta(command, 0, "", 6, finish_reason="length")]))
    house.loop.turn()
    deltas = [c["choices"][0]["delta"] for c in client.responses()[0].chunks()]
    assert deltas == [{"role": "assistant", "content": "😀"}, {"content": "b"}, {}]


def test_answer_without_a_token_still_has_a_role(house, make_delta):
    house.tokenizer = lambda command: [
        Deltas([make_delta(command, 0, "", 1, finish_reason="stop")])
    ]
    (chunk,) = house.chat(stream=True).chunks()
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_defaults(house):
    house.chat()
    command = house.generated()
    assert command.params.max_tokens is None
    assert command.prompts == []
    assert command.chat.add_generation_prompt and not command.chat.continue_final_message
    assert not command.chat.add_special_tokens


def test_max_completion_tokens_wins(house):
    house.chat(max_completion_tokens=10)
    assert house.generated().params.max_tokens == 10
    house.chat(max_completion_tokens=10, max_tokens=99)
    assert house.generated().params.max_tokens == 10
    house.chat(max_tokens=99)
    assert house.generated().params.max_tokens == 99
    house.refused(house.chat(max_tokens=0), 400, "max_tokens")
    house.refused(house.chat(max_completion_tokens=0), 400, "max_completion_tokens")
    house.refused(house.chat(max_completion_tokens=-1), 400, "max_completion_tokens")


def test_no_output_only_with_echo(house):
    """Scoring a conversation: prompt_logprobs and nothing after them."""
    house.refused(house.chat(max_tokens=0, prompt_logprobs=0), 400, "max_tokens")
    house.refused(house.chat(max_tokens=-1, echo=True), 400, "max_tokens")
    assert house.chat(max_tokens=0, echo=True, prompt_logprobs=0).status == 200
    params = house.generated().params
    assert (params.max_tokens, params.prompt_logprobs) == (0, 0)


def test_templates_of_clients_are_not_trusted_by_default(house):
    given = {"chat_template": "{{ messages }}"}
    message = house.refused(house.chat(**given), 400, "chat_template")
    assert "--trust-request-chat-template" in message
    house.refused(house.post("/tokenize", {"messages": [], **given}), 400, "chat_template")


def test_template_fields(make_house):
    house = make_house(trust_request_chat_template=True)
    fields = {
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"title": "t", "text": "x"}],
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "reasoning_effort": "low",
    }
    assert house.chat(**fields).status == 200
    prompt = house.generated().chat
    assert prompt.chat_template == "{{ messages }}"
    assert prompt.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert prompt.documents == [{"title": "t", "text": "x"}]
    assert not prompt.add_generation_prompt and prompt.add_special_tokens


def test_continue_final_message(house):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once"}]
    both = _ask(house, messages, continue_final_message=True, add_generation_prompt=True)
    house.refused(both, 400, "continue_final_message")
    assert _ask(house, messages, continue_final_message=True).status == 200
    prompt = house.generated().chat
    assert prompt.continue_final_message and not prompt.add_generation_prompt
    assert not house.generated().echo
    # The tokenizer puts the prefix in front; it only has to be asked to.
    assert _ask(house, messages, continue_final_message=True, echo=True).status == 200
    assert house.generated().echo


def test_reasoning_effort_is_one_that_is_known(house):
    said = house.refused(house.chat(reasoning_effort="foo"), 400, "reasoning_effort")
    assert "low, medium, high" in said and said.endswith("got 'foo'")
    assert house.chat(reasoning_effort="none").status == 200


def test_what_is_missing_and_what_is_empty(make_house):
    house = make_house()
    said = {"role": "user", "content": "x"}
    for message, problem in (
        ({"content": "x"}, "messages[0].role is required"),
        ({**said, "role": ""}, "messages[0].role must be a string, got ''"),
        ({**said, "content": [{"type": "text"}]}, "messages[0].content[0].text is required"),
    ):
        assert house.refused(_ask(house, [message]), 400, problem.split()[0]) == problem


def test_contents(house):
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B", "cache_control": {}}]
    plain = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    for role in ("system", "user", "assistant", "tool", "developer"):
        assert _ask(house, [{"role": role, "content": parts}]).status == 200
        assert house.generated().chat.messages == [{"role": role, "content": plain}]
    assert _ask(house, [{"role": "user", "content": ["A"]}]).status == 200
    assert house.generated().chat.messages[0]["content"] == [{"type": "text", "text": "A"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    assert _ask(house, [call]).status == 200
    assert house.generated().chat.messages == [{**call, "content": ""}]


BAD_MESSAGES = {
    "no role": ([{"content": "x"}], "messages[0].role"),
    "role of a wrong type": ([{"role": 5, "content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "null content": ([{"role": "system", "content": None}], "messages[0].content"),
    "number": ([{"role": "user", "content": 5}], "messages[0].content"),
    "object": ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
        "messages[0].content[0]",
    ),
    "audio": ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
    "part without type": ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
    "part of an odd type": ([{"role": "user", "content": [{"type": ["text"]}]}], None),
    "part that is a number": ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
    "text of a wrong type": (
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "messages[0].content[0].text",
    ),
    "second message": ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content"),
    "empty list": ([], "messages"),
    "null": (None, "messages"),
    "string": ("hi", "messages"),
    "not objects": (["hi"], "messages"),
}


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
@pytest.mark.parametrize("stream", [False, True])
def test_bad_messages(house, messages, param, stream):
    house.refused(_ask(house, messages, stream=stream), 400, param)


def test_missing_messages(house):
    house.refused(house.post(PATH, {}), 400, "messages")
    message = house.refused(house.post(PATH, {"prompt": "x"}), 400, "prompt")
    assert "unknown field" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("verbosity", "low"),
        ("include_reasoning", "no"),
        ("best_of", 2),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("guided_grammar", "x"),
        ("structured_outputs", {"json": 5}),
        ("n", 0),
        ("n", 129),
        ("logit_bias", {"AI": 1}),
    ],
)
def test_unsupported_or_out_of_range(house, field, value):
    assert field in house.refused(house.chat(**{field: value}), 400, field)
    assert field in house.refused(house.chat(stream=True, **{field: value}), 400, field)


def test_harmless_fields_are_accepted(house):
    response = house.chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="default",
        modalities=["text"],
        prediction={"type": "content", "content": "x"},
        verbosity="medium",
        response_format={"type": "text"},
        parallel_tool_calls=False,
    )
    assert response.status == 200


# -------------------------------------------------------------------------------- logprobs


def _answer_with_logprobs(make_delta):
    top = [(1, "<|end|>", b"<|end|>", -0.1), (2, "�", b"\xf0", float("-inf"))]
    entries = [TokenLogprob(3, "é", "é".encode(), -2.5, top)]

    def answer(command):
        if command.params.logprobs is None:
            return [Deltas([make_delta(command, 0, "é", 1, finish_reason="stop")])]
        shown = entries
        if command.params.logprobs == 0:
            shown = [TokenLogprob(3, "é", "é".encode(), -2.5)]
        end = make_delta(command, 0, "é", 1, finish_reason="stop", logprobs=shown)
        return [Deltas([end])]

    return answer


def test_logprobs(house, make_delta):
    house.tokenizer = _answer_with_logprobs(make_delta)
    expected = {
        "token": "é",
        "logprob": -2.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "<|end|>", "logprob": -0.1, "bytes": list(b"<|end|>")},
            {"token": "�", "logprob": -9999.0, "bytes": [0xF0]},
        ],
    }
    whole = house.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert whole["content"] == [expected]
    (chunk,) = house.chat(logprobs=True, top_logprobs=2, stream=True).chunks()
    assert chunk["choices"][0]["logprobs"]["content"] == [expected]


@pytest.mark.parametrize("top", [{}, {"top_logprobs": None}, {"top_logprobs": 0}])
def test_logprobs_without_alternatives(house, make_delta, top):
    house.tokenizer = _answer_with_logprobs(make_delta)
    choice = house.chat(logprobs=True, **top).json()["choices"][0]
    assert house.generated().params.logprobs == 0
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("value", [False, None])
def test_no_logprobs(house, value):
    assert house.chat(logprobs=value).json()["choices"][0]["logprobs"] is None
    assert house.generated().params.logprobs is None


def test_bad_logprobs(house):
    house.refused(house.chat(top_logprobs=3), 400, "top_logprobs")
    house.refused(house.chat(logprobs=False, top_logprobs=3), 400, "top_logprobs")
    house.refused(house.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs")
    house.refused(house.chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs")
    house.refused(house.chat(logprobs=1), 400, "logprobs")


def test_token_ids_and_prompt_logprobs_stand_at_the_top(house, make_delta):
    def answer(command):
        first = {"prompt_token_ids": [7], "prompt_logprobs": [TokenLogprob(7, "p", b"p", None)]}
        return [
            Deltas([make_delta(command, 0, "a", 1, token_ids=[1], **first)]),
            Deltas([make_delta(command, 0, "b", 2, token_ids=[2], finish_reason="stop")]),
        ]

    house.tokenizer = answer
    body = house.chat(return_token_ids=True, prompt_logprobs=0).json()
    assert body["prompt_token_ids"] == [7]
    assert body["prompt_logprobs"] == [None]
    assert body["choices"][0]["token_ids"] == [1, 2]
    chunks = house.chat(return_token_ids=True, prompt_logprobs=0, stream=True).chunks()
    assert chunks[0]["prompt_token_ids"] == [7]
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [1, 2]


def test_keys_and_roles_of_messages_are_checked(make_house):
    house = make_house()
    wrong = [
        ({"role": "usr", "content": "x"}, "messages[0].role", "did you mean 'user'"),
        ({"role": "user", "contents": "x"}, "messages[0].contents", "did you mean 'content'"),
        ({"role": "user", "content": "x", "zzz": 1}, "messages[0].zzz", "unknown field 'zzz'"),
    ]
    for message, param, words in wrong:
        for path, more in (("/v1/chat/completions", {}), ("/tokenize", {})):
            answer = house.post(path, {"messages": [message], **more})
            assert words in house.refused(answer, 400, param)
    sent_back = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "id": "1"}
    for message in (sent_back, {"role": "ipython", "content": "x"}):
        assert house.chat(messages=[message]).status == 200
    lenient = make_house(unknown_fields="ignore")
    assert lenient.chat(messages=[{"role": "usr", "content": "x", "zzz": 1}]).status == 200


def test_errors_name_the_field_that_was_given(house):
    for value in (0, 2**31):
        message = house.refused(
            house.chat(max_completion_tokens=value), 400, "max_completion_tokens"
        )
        assert message.startswith("max_completion_tokens")
    house.chat(max_completion_tokens=7)
    assert house.generated().max_tokens_field == "max_completion_tokens"


def test_types_are_told_in_words(house):
    for fields, words in (
        ({"messages": "x"}, "messages: expected a list, got a string"),
        ({"temperature": "hot"}, "temperature: expected a number, got a string"),
        ({"stop": 5}, "stop: expected a string or a list, got a whole number"),
        ({"stream": 1}, "stream: expected true or false, got a whole number"),
    ):
        assert words in house.refused(house.chat(**fields), 400, next(iter(fields)))
