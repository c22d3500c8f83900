"""Fields of completions and chat on a real model: CASES 6, 9, 10, 11, 51, 69, 71.

Every answer is held against the types of /openapi.json.
"""

from typing import Any

import msgspec
import pytest

from zlm.frontend.openai import answer_types

CHAT = "/v1/chat/completions"
PROMPT = "The capital of France is"
MESSAGES = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "The colour is"},
]


def conforms(value: Any, kind: Any) -> None:
    assert msgspec.to_builtins(msgspec.convert(value, kind)) == value


def complete(server: Any, prompt: Any, **fields: Any) -> Any:
    """The only choice of a completion; the streamed answer must be the same."""
    whole = server.complete(prompt, **fields)
    assert whole.status == 200, whole.body
    conforms(whole.json, answer_types.Completion)
    (choice,) = whole.json["choices"]
    stream = server.complete(prompt, stream=True, **fields)
    for event in stream.events:
        conforms(event, answer_types.Completion)
    last = stream.events[-1]["choices"][0]
    assert stream.streamed_text == choice["text"]
    for name in ("finish_reason", "stop_reason"):
        assert last[name] == choice[name]
    return choice


def chat(server: Any, messages: Any, **fields: Any) -> Any:
    body = {"messages": messages, "temperature": 0, "max_tokens": 4, **fields}
    answer = server.request("POST", CHAT, body)
    assert answer.status == 200, answer.body
    conforms(answer.json, answer_types.ChatCompletion)
    return answer.json


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("ends", ["stop", "length"])
def test_case_6_ends_and_usage_are_true(server: Any, kind: str, ends: str) -> None:
    ask = server.complete if kind == "text" else server.chat
    # A bias makes the end token (2) certain; ignore_eos keeps it away.
    fields = {"logit_bias": {"2": 100}} if ends == "stop" else {"ignore_eos": True}
    whole = ask("Say hi", max_tokens=3, **fields).json
    usage = whole["usage"]
    assert whole["choices"][0]["finish_reason"] == ends
    assert whole["choices"][0]["stop_reason"] is None, "CASE 13: an EOS id is not named"
    assert usage["completion_tokens"] == (1 if ends == "stop" else 3)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    stream = ask(
        "Say hi", max_tokens=3, stream=True, stream_options={"include_usage": True}, **fields
    )
    *chunks, last = stream.events
    names = {"text": ("text_completion",) * 2, "chat": ("chat.completion", "chat.completion.chunk")}
    assert whole["object"] == names[kind][0]
    assert {chunk["object"] for chunk in stream.events} == {names[kind][1]}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + [ends]
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == usage[name]


@pytest.fixture(scope="module")
def free(server: Any) -> str:
    """A completion of a dozen tokens that nothing stops."""
    text: str = complete(server, PROMPT, max_tokens=12, ignore_eos=True)["text"]
    return text


@pytest.mark.parametrize(
    ("cuts", "form"),
    [([(3, 10)], str), ([(3, 10)], list), ([(4, 5)], list), ([(9, 16), (5, 12), (7, 9)], list)],
    ids=["a string", "a list", "one character", "the earliest of three"],
)
@pytest.mark.parametrize("included", [False, True], ids=["without", "with the string"])
def test_case_9_10_and_11_stop_strings_of_every_form(
    server: Any, free: str, cuts: list[tuple[int, int]], form: Any, included: bool
) -> None:
    """Strings that begin and end within tokens; the answer ends at the first in the text."""
    strings = [free[start:end] for start, end in cuts]
    found = min(strings, key=free.index)
    stop = strings[0] if form is str else [*strings, "never there"]
    fields = {"max_tokens": 12, "stop": stop, "include_stop_str_in_output": included}
    choice = complete(server, PROMPT, ignore_eos=True, **fields)
    before = free.partition(found)[0]
    assert choice["text"] == (before + found if included else before)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", found)


def test_case_10_two_line_breaks_and_stop_ids(server: Any) -> None:
    free = complete(server, PROMPT, return_token_ids=True, max_tokens=4)
    assert free["text"] == " Paris.\n\n"
    choice = complete(server, PROMPT, stop=["\n\n"])
    assert (choice["text"], choice["stop_reason"]) == (" Paris.", "\n\n")
    period = free["token_ids"][1]
    choice = complete(server, PROMPT, stop_token_ids=[period])
    assert (choice["text"], choice["stop_reason"]) == (" Paris", period)
    shown = {"stop_token_ids": [period], "include_stop_str_in_output": True}
    choice = complete(server, PROMPT, **shown)
    assert (choice["text"], choice["stop_reason"]) == (" Paris.", period)


def test_case_51_salts_share_only_with_themselves(server: Any) -> None:
    prompt = "A prompt of a few blocks. " * 12
    cached = [
        server.complete(prompt, max_tokens=1, cache_salt=salt).json["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]
        for salt in ("salt of this test", "salt of this test", "another salt of this test")
    ]
    assert cached[0] == 0 and cached[1] > 0 and cached[2] == 0


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_case_69_parts_and_a_joined_string_are_one_prompt(server: Any, role: str) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    last = {"role": "user", "content": "x"}
    prompts = [
        chat(server, [{"role": role, "content": content}, last], return_token_ids=True)
        for content in (parts, "A\nB")
    ]
    assert prompts[0]["prompt_token_ids"] == prompts[1]["prompt_token_ids"]
    image = [{"role": role, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert server.request("POST", CHAT, {"messages": image}).status == 400


def test_case_71_an_answer_goes_on_from_the_last_message(server: Any) -> None:
    going_on = {"continue_final_message": True, "return_token_ids": True}
    answers = [
        chat(server, MESSAGES, **going_on),
        chat(server, MESSAGES, add_generation_prompt=False, **going_on),
        *(chat(server, MESSAGES, echo=True, **going_on) for _ in range(2)),
    ]
    text = answers[0]["choices"][0]["message"]["content"]
    assert text and not text.startswith("The colour is")
    assert answers[1]["choices"][0]["message"]["content"] == text
    for echoed in answers[2:]:
        assert echoed["choices"][0]["message"]["content"] == "The colour is" + text
    ids = answers[0]["prompt_token_ids"]
    tail = server.request("POST", "/detokenize", {"tokens": ids[-3:]}).json["prompt"]
    assert tail == "The colour is"
    both = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}
    assert server.request("POST", CHAT, both).status == 400


def test_a_conversation_is_scored_as_its_ids_are(server: Any) -> None:
    """prompt_logprobs of a chat without output equal those of a completion of the same ids."""
    fields = {"max_tokens": 0, "echo": True, "prompt_logprobs": 2, "return_token_ids": True}
    scored = chat(server, MESSAGES[:1], **fields)
    assert scored["usage"]["completion_tokens"] == 0
    ids = scored["prompt_token_ids"]
    assert scored["choices"][0]["token_ids"] == []
    assert len(scored["prompt_logprobs"]) == len(ids) and scored["prompt_logprobs"][0] is None
    choice = complete(server, ids, **fields)
    for one, other in zip(
        scored["prompt_logprobs"][1:], choice["prompt_logprobs"][1:], strict=True
    ):
        assert set(one) == set(other) and len(one) in (2, 3)
        for token_id, entry in one.items():
            assert entry["rank"] == other[token_id]["rank"]
            assert abs(entry["logprob"] - other[token_id]["logprob"]) < 1e-4


def test_truncated_prompts(server: Any) -> None:
    long = "one two three four five six seven eight nine ten " * 300
    assert server.complete(long).status == 400
    choice = complete(
        server, long, truncate_prompt_tokens=7, echo=True, return_token_ids=True, max_tokens=2
    )
    assert len(choice["prompt_token_ids"]) == 7
    shown = server.request("POST", "/detokenize", {"tokens": choice["prompt_token_ids"]}).json
    assert long.endswith(shown["prompt"]) and choice["text"].startswith(shown["prompt"])
    fitting = server.complete(long, truncate_prompt_tokens=-1, max_tokens=5).json["usage"]
    assert fitting["prompt_tokens"] == 1024 - 5 and fitting["completion_tokens"] == 5
    messages = [{"role": "user", "content": long}]
    assert chat(server, messages, truncate_prompt_tokens=9)["usage"]["prompt_tokens"] == 9


def test_words_and_ids_that_may_be_produced(server: Any) -> None:
    assert complete(server, PROMPT, max_tokens=1)["text"] == " Paris"
    assert "Paris" not in complete(server, PROMPT, bad_words=["Paris"], max_tokens=4)["text"]
    choice = complete(
        server, PROMPT, allowed_token_ids=[28, 30], return_token_ids=True, max_tokens=4
    )
    assert set(choice["token_ids"]) <= {28, 30}
    masked = server.complete(PROMPT, allowed_token_ids=[28], bad_words=[","])
    assert masked.status == 400
    assert "candidate" in masked.json["error"]["message"]
    server.assert_good()
