"""POST /v1/completions: every field, the shapes of prompts and answers.

CASES 6, 19, 26, 35, 37, 39, 40, 55, 56, 60, 62 and 63.
"""

import math
from itertools import pairwise

import pytest

from zlm.messages import Deltas, TokenLogprob

PATH = "/v1/completions"


def test_answer(house):
    body = house.complete(max_tokens=4).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello wörld!",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_stream(house):
    response = house.complete(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    chunks = response.chunks()
    whole = house.complete().json()
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all(c["text"] or c["finish_reason"] for c in choices)


def test_stream_and_answer_have_the_same_keys(house):
    chunk = house.complete(stream=True).chunks()[0]
    body = house.complete().json()
    assert set(body) - set(chunk) == {"usage"}
    assert set(body["choices"][0]) == set(chunk["choices"][0])


def test_defaults(house):
    house.complete()
    command = house.generated()
    assert command.params.max_tokens == 16
    assert command.params.n == 1
    assert command.params.temperature is None
    assert command.add_special_tokens
    assert not command.echo and not command.stream
    assert command.chat is None


def test_every_sampling_field_reaches_the_tokenizer(house):
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": -(2**63),
        "max_tokens": 7,
        "min_tokens": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "bad_words": ["bad"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 3,
        "prompt_logprobs": 0,
        "allowed_token_ids": [1, 5],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 4,
    }
    extra = {
        "logit_bias": {"5": 1.5, "17": -100},
        "echo": True,
        "add_special_tokens": False,
        "return_token_ids": True,
        "priority": -3,
        "cache_salt": "salt",
    }
    assert house.complete(**given, **extra).status == 200
    command = house.generated()
    for name, value in given.items():
        assert getattr(command.params, name) == value
    assert command.params.logit_bias == {5: 1.5, 17: -100.0}
    assert command.echo and not command.add_special_tokens and command.return_token_ids
    assert (command.priority, command.cache_salt) == (-3, "salt")


def test_harmless_fields_are_accepted(house):
    response = house.complete(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        suffix="",
        use_beam_search=False,
        length_penalty=1.0,
        response_format={"type": "text"},
        best_of=1,
    )
    assert response.status == 200
    assert house.complete(n=2, best_of=2).status == 200
    house.refused(house.complete(n=2, best_of=1), 400, "best_of")  # CASES 39


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 0),
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 2.0),
        ("suffix", "x"),
        ("logits_processors", ["x"]),
        ("prompt_embeds", "x"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "nonsense"}),
        ("response_format", "text"),
        ("structured_outputs", {"regex": "a", "json": {}}),
        ("structured_outputs", {}),
    ],
)
def test_unsupported_fields_are_refused_by_name(house, field, value):
    assert field in house.refused(house.complete(**{field: value}), 400, field)
    assert house.refused(house.complete(stream=True, **{field: value}), 400, field)


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_choice"])
def test_guided_fields_name_their_successor(house, field):
    assert "structured_outputs" in house.refused(house.complete(**{field: "x"}), 400, field)


OUT_OF_RANGE = [
    ("n", 0),
    ("n", -1),
    ("n", 10**6),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("seed", 2**63),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("max_tokens", -1),
    ("max_tokens", 2**40),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", "a" * 257),
    ("stop_token_ids", list(range(129))),
    ("bad_words", ["a"] * 129),
    ("bad_words", [""]),
    ("logit_bias", {"AI": -100}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {" 1": 1}),
    ("logit_bias", {"١": 1}),
    ("logit_bias", {"1" * 30: 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("allowed_token_ids", []),
    ("truncate_prompt_tokens", 0),
    ("cache_salt", "s" * 257),
    ("priority", 2**63),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
@pytest.mark.parametrize("stream", [False, True])
def test_value_out_of_range(house, field, value, stream):
    response = house.complete(**{field: value}, stream=stream)
    assert field in house.refused(response, 400, field)


def test_a_seed_beyond_the_largest_is_told_its_range(house):
    said = house.refused(house.complete(seed=2**63), 400, "seed")
    assert f"between {-(2**63)} and {2**63 - 1}" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.0),
        ("top_p", 1),
        ("temperature", 0),
        ("temperature", 1e-6),
        ("temperature", 2),
        ("top_k", -1),
        ("top_k", 0),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("n", 128),
        ("logprobs", 0),
        ("stop", []),
        ("stop", "\n\n"),
        ("logit_bias", {"0": 0}),
        ("logit_bias", {"-1": 0}),  # whether it is in the vocabulary is the tokenizer's to say
    ],
)
def test_value_at_the_edge(house, field, value):
    assert house.complete(**{field: value}).status == 200
    assert field == "logit_bias" or getattr(house.generated().params, field) == value


def test_huge_stop_list_is_refused(house):
    house.refused(house.complete(stop=["a"] * 500_000), 400, "stop")


PROMPTS = {
    "string": ("hi", ["hi"]),
    "empty string": ("", [""]),
    "strings": (["a", "b"], ["a", "b"]),
    "ids": ([1, 2, 3], [[1, 2, 3]]),
    "lists of ids": ([[1], [2, 3]], [[1], [2, 3]]),
    "ids out of any vocabulary": ([-1, 2**62], [[-1, 2**62]]),
}


@pytest.mark.parametrize(("prompt", "prompts"), PROMPTS.values(), ids=PROMPTS.keys())
def test_shapes_of_prompt(house, prompt, prompts):
    assert house.post(PATH, {"prompt": prompt}).status == 200
    assert house.generated().prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        [[1], []],
        ["a", 1],
        [1, [2]],
        ["a", [1]],
        [1.5],
        [1.0],
        ["a", None],
        [True],
        [["1"]],
        [[1.5]],
        [[True]],
        [[[1]]],
        5,
        {"a": 1},
        [None],
    ],
)
def test_other_shapes_of_prompt(house, prompt):
    house.refused(house.post(PATH, {"prompt": prompt}), 400, "prompt")


def test_missing_prompt(house):
    house.refused(house.post(PATH, {}), 400, "prompt")


def test_too_many_prompts(house):
    assert "1024" in house.refused(house.post(PATH, {"prompt": ["a"] * 1025}), 400, "prompt")
    assert house.post(PATH, {"prompt": ["a"] * 1024}).status == 200


def test_order_and_usage_of_several_prompts(house):
    body = house.post(PATH, {"prompt": ["a", "b", "c"], "n": 2}).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert body["usage"]["prompt_tokens"] == 15  # each prompt once
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


def test_choices_that_end_out_of_order_are_sorted(house, make_delta):
    def reversed_order(command):
        ends = [make_delta(command, i, str(i), 1, finish_reason="length") for i in (2, 0, 1)]
        return [Deltas([end]) for end in ends]

    house.tokenizer = reversed_order
    body = house.complete(n=3).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "0"), (1, "1"), (2, "2")]


def test_stream_of_several_choices(house):
    chunks = house.post(PATH, {"prompt": ["a", "b"], "n": 2, "stream": True}).chunks()
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"Hello wörld!"}
    finished = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(c["index"] for c in finished) == [0, 1, 2, 3]


def test_max_tokens_zero_only_with_echo(house):
    house.refused(house.complete(max_tokens=0), 400, "max_tokens")
    assert house.complete(max_tokens=0, echo=True).status == 200


# -------------------------------------------------------------------------------- logprobs


def _token(text, logprob, top=(), **fields):
    data = text.encode()
    return TokenLogprob(
        9, text, data, logprob, [(i, t, t.encode(), v) for i, t, v in top], **fields
    )


def _with_logprobs(make_delta, entries, stream_cuts=()):
    """A tokenizer whose answer has these log-probabilities, streamed in parts cut there.

    Entry i stands at character 2i.
    """

    def answer(command):
        if not command.stream:
            text = "".join(e.token for e in entries)
            end = make_delta(
                command,
                0,
                text,
                3,
                finish_reason="stop",
                logprobs=entries,
                text_offsets=[2 * i for i in range(len(entries))],
            )
            return [Deltas([end])]
        bounds = [0, *stream_cuts, len(entries)]
        parts = [entries[a:b] for a, b in pairwise(bounds)]
        deltas = [
            make_delta(
                command,
                0,
                "".join(e.token for e in part),
                3,
                logprobs=part,
                text_offsets=[2 * i for i in range(a, a + len(part))],
            )
            for a, part in zip(bounds, parts, strict=False)
        ]
        return [
            *(Deltas([d]) for d in deltas),
            Deltas([make_delta(command, 0, "", 3, finish_reason="stop")]),
        ]

    return answer


def test_logprobs_zero(house, make_delta):
    house.tokenizer = _with_logprobs(make_delta, [_token("é", -0.5), _token("b", -1.0)])
    logprobs = house.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["é", "b"],
        "token_logprobs": [-0.5, -1.0],
        "text_offset": [0, 2],
        "top_logprobs": None,
    }


def test_logprobs_with_alternatives(house, make_delta):
    entries = [_token("a", -3.0, top=[(1, "b", -0.1), (2, "c", -2.0)])]
    house.tokenizer = _with_logprobs(make_delta, entries)
    logprobs = house.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"b": -0.1, "c": -2.0, "a": -3.0}]


def test_impossible_values_are_finite(house, make_delta):
    inf = math.inf
    entries = [_token("a", -inf, top=[(1, "b", math.nan), (2, "c", -1e30)])]
    house.tokenizer = _with_logprobs(make_delta, entries)
    for stream in (False, True):
        response = house.complete(logprobs=2, stream=stream)
        body = response.chunks()[0] if stream else response.json()
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-9999.0]
        assert logprobs["top_logprobs"] == [{"b": -9999.0, "c": -9999.0, "a": -9999.0}]


def test_echo_with_logprobs_begins_with_null(house, make_delta):
    entries = [_token("Wört", None), _token("er", -1.0, top=[(3, "er", -1.0)]), _token("!", -2.0)]
    house.tokenizer = _with_logprobs(make_delta, entries)
    choice = house.complete(echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "Wörter!"
    assert choice["logprobs"]["tokens"] == ["Wört", "er", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"er": -1.0}, {"!": -2.0}]
    assert choice["logprobs"]["text_offset"] == [0, 2, 4]


def test_text_offset_goes_on_through_a_stream(house, make_delta):
    entries = [_token(t, -1.0) for t in ("ab", "ç", "<|end|>", "d")]
    house.tokenizer = _with_logprobs(make_delta, entries, stream_cuts=(1, 3))
    chunks = house.complete(logprobs=0, stream=True).chunks()
    offsets = [
        o for c in chunks for o in (c["choices"][0]["logprobs"] or {}).get("text_offset", [])
    ]
    house.tokenizer = _with_logprobs(make_delta, entries)
    whole = house.complete(logprobs=0).json()["choices"][0]["logprobs"]["text_offset"]
    assert offsets == whole == [0, 2, 4, 6]


def test_tokens_as_ids_do_not_change_offsets(house, make_delta):
    house.tokenizer = _with_logprobs(make_delta, [_token("é", -0.5), _token("b", -1.0)])
    response = house.complete(logprobs=0, return_tokens_as_token_ids=True)
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:9", "token_id:9"]
    assert logprobs["text_offset"] == [0, 2]


def test_prompt_logprobs(house, make_delta):
    entries = [
        _token("a", None),
        _token("b", -1.0, top=[(9, "b", -1.0)]),
        _token("c", -7.0, top=[(4, "d", -0.2)], rank=12),
        _token("e", -7.0, top=[(4, "d", -0.2)]),
    ]

    def answer(command):
        end = make_delta(command, 0, "x", 1, finish_reason="stop", prompt_logprobs=entries)
        return [Deltas([end])]

    house.tokenizer = answer
    expected = [
        None,
        {"9": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}},
        {
            "4": {"logprob": -0.2, "rank": 1, "decoded_token": "d"},
            "9": {"logprob": -7.0, "rank": 12, "decoded_token": "c"},
        },
        {
            "4": {"logprob": -0.2, "rank": 1, "decoded_token": "d"},
            "9": {"logprob": -7.0, "rank": None, "decoded_token": "e"},
        },
    ]
    body = house.complete(prompt_logprobs=1).json()
    assert body["choices"][0]["prompt_logprobs"] == expected
    (chunk,) = house.complete(prompt_logprobs=1, stream=True).chunks()
    assert chunk["choices"][0]["prompt_logprobs"] == expected


def test_token_ids(house, make_delta):
    def answer(command):
        parts = [
            make_delta(command, 0, "a", 1, token_ids=[1], prompt_token_ids=[7, 8]),
            make_delta(command, 0, "", 2, token_ids=[2]),
            make_delta(command, 0, "b", 3, token_ids=[3], finish_reason="length"),
        ]
        return [Deltas([part]) for part in parts]

    house.tokenizer = answer
    whole = house.complete(return_token_ids=True).json()["choices"][0]
    assert whole["token_ids"] == [1, 2, 3]
    assert whole["prompt_token_ids"] == [7, 8]
    chunks = house.complete(return_token_ids=True, stream=True).chunks()
    choices = [c["choices"][0] for c in chunks]
    assert [i for c in choices for i in c["token_ids"]] == [1, 2, 3]
    assert choices[0]["prompt_token_ids"] == [7, 8]
    assert house.complete(stream=False).json()["choices"][0]["finish_reason"] == "length"


def test_stop_reason(house, make_delta):
    for reason in ("###", 17):
        house.tokenizer = lambda command, reason=reason: [
            Deltas([make_delta(command, 0, "x", 1, finish_reason="stop", stop_reason=reason)])
        ]
        assert house.complete().json()["choices"][0]["stop_reason"] == reason
        assert house.complete(stream=True).chunks()[-1]["choices"][0]["stop_reason"] == reason


# ------------------------------------------------------------------------------ stream_options


def test_include_usage(house):
    whole = house.complete().json()["usage"]
    *chunks, last = house.complete(stream=True, stream_options={"include_usage": True}).chunks()
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_asked(house, options):
    chunks = house.complete(stream=True, stream_options=options).chunks()
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_continuous_usage(house, make_delta):
    options = {"include_usage": True, "continuous_usage_stats": True}
    client = house.client()
    house.tokenizer = lambda command: []
    body = {"prompt": "x", "stream": True, "stream_options": options}
    client.request("POST", PATH, body)
    for tokens, text in enumerate("abc", start=1):
        finish = "length" if tokens == 3 else None
        command = house.generated()
        house.take(Deltas([make_delta(command, 0, text, tokens, finish_reason=finish)]))
        house.loop.turn()
    chunks = client.responses()[0].chunks()
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]
    assert all(c["usage"]["prompt_tokens"] == 5 for c in chunks)
    assert chunks[-1]["choices"] == []


def test_bad_stream_options(house):
    house.refused(house.complete(stream_options={"include_usage": True}), 400, "stream_options")
    house.refused(house.complete(stream=False, stream_options={}), 400, "stream_options")
    response = house.complete(stream=True, stream_options={"include_usages": True})
    house.refused(response, 400, "stream_options.include_usages")
    assert response.json()["error"]["code"] == "unknown_field"
    response = house.complete(stream=True, stream_options={"include_usage": "yes"})
    house.refused(response, 400, "stream_options.include_usage")


# --------------------------------------------------------------------------------------- model


def test_model_names(make_house):
    house = make_house(names=("A", "org/B"))
    assert house.complete().json()["model"] == "A"
    assert house.complete(model="org/B").json()["model"] == "org/B"
    assert house.complete(model="org/B", stream=True).chunks()[0]["model"] == "org/B"
    for name in ("C", "", "/models/tiny", "x" * 10_000):
        response = house.complete(model=name)
        message = house.refused(response, 404, "model")
        assert response.error["code"] == "model_not_found"
        assert "A, org/B" in message and len(message) < 500
