"""What is refused, and what the engine is asked (CASES 15, 16, 19, 32, 33, 34, 35, 37, 43, 44)."""

import struct
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from zlm.config import GenerationDefaults, ServerOptions
from zlm.errors import ConfigError
from zlm.messages import ChatPrompt, EngineReady, Submit
from zlm.sampling_params import MAX_STOP_STRINGS

USER = [{"role": "user", "content": "Hi"}]


def ints(column: bytes) -> list[int]:
    return list(array("i", column))


@pytest.mark.parametrize("token_id", [-1, 512, 2**31, 2**62])
def test_prompt_ids_out_of_the_vocabulary(make_engine: Callable, token_id: int) -> None:
    engine = make_engine()
    for prompt in ([token_id], [[1, 2], [3, token_id]]):
        assert engine.generate(prompt) == []
        failed = engine.failed()
        assert (failed.status, failed.param) == (400, "prompt")
        assert f"{token_id}, which is out of vocabulary" in failed.message
        assert "0 to 511" in failed.message
    assert len(engine.generate([0, 511])) == 1  # the bound is the model's, not the tokenizer's


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {512: -100.0}),
        ("logit_bias", {-1: 1.0}),
        ("stop_token_ids", [10**6]),
        ("allowed_token_ids", [3, 512]),
    ],
)
def test_other_ids_out_of_the_vocabulary(make_engine: Callable, field: str, value: Any) -> None:
    engine = make_engine()
    assert engine.generate(**{field: value}) == []
    assert (engine.failed().status, engine.failed().param) == (400, field)
    assert "0 to 511" in engine.failed().message
    assert len(engine.generate()) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"n": 0},
        {"n": 129},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"logit_bias": {1: 100.5}},
        {"logit_bias": {1: float("nan")}},
        {"prompt_logprobs": 21},
        {"min_tokens": 5, "max_tokens": 4},
        {"max_tokens": 0},
        {"stop": ["x"], "detokenize": False},
    ],
)
def test_values_out_of_range(make_engine: Callable, values: dict[str, Any]) -> None:
    engine = make_engine()
    assert engine.generate(**values) == []
    assert engine.failed().status == 400
    assert engine.failed().param in values


def test_a_huge_stop_list_is_refused_at_once(make_engine: Callable) -> None:
    engine = make_engine()
    start = time.process_time()
    engine.generate(stop=["x"] * 500_000)
    assert engine.failed().param == "stop"
    assert str(MAX_STOP_STRINGS) in engine.failed().message
    engine.generate(bad_words=["x"] * 500_000)
    assert engine.failed().param == "bad_words"
    assert time.process_time() - start < 0.5


def test_seeds_become_unsigned(make_engine: Callable) -> None:
    engine = make_engine()
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        (submit,) = engine.generate(seed=seed)
        assert submit.sampling.seed == seed % 2**64


def test_seeds_of_requests_without_one(make_engine: Callable) -> None:
    def seeds(engine: Any) -> list[int]:
        return [s.sampling.seed for s in engine.generate(["a", "b"]) + engine.generate("c")]

    fresh = seeds(make_engine()) + seeds(make_engine())
    assert len(set(fresh)) == 6
    assert all(0 <= seed < 2**64 for seed in fresh)
    assert seeds(make_engine(seed=7)) == seeds(make_engine(seed=7)) != seeds(make_engine(seed=8))


# ---------------------------------------------------------------------- lengths


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_at_the_limit(make_engine: Callable, stream: bool) -> None:
    engine = make_engine(max_model_len=32)
    (submit,) = engine.generate([5] * 31, max_tokens=None, stream=stream)
    assert submit.max_tokens == 1
    for count in (32, 33, 320):
        assert engine.generate([5] * count, max_tokens=None, stream=stream) == []
        failed = engine.failed()
        assert (failed.status, failed.code) == (400, "context_length_exceeded")
        assert f"{count} tokens" in failed.message
        assert "32 tokens" in failed.message
    # Scoring needs no room.
    (submit,) = engine.generate([5] * 32, max_tokens=0, echo=True, logprobs=0)
    assert submit.max_tokens == 0
    assert engine.generate([5] * 33, max_tokens=0, echo=True, logprobs=0) == []
    assert engine.failed().code == "context_length_exceeded"
    assert len(engine.generate([5] * 3)) == 1


def test_max_tokens_over_the_room(make_engine: Callable) -> None:
    engine = make_engine(max_model_len=32)
    assert engine.generate([5] * 20, max_tokens=13) == []
    failed = engine.failed()
    assert (failed.code, failed.param) == ("context_length_exceeded", "max_tokens")
    for number in ("20", "13", "32"):
        assert number in failed.message
    assert engine.generate([5] * 20, max_tokens=12)[0].max_tokens == 12
    engine = make_engine(max_model_len=32, server=ServerOptions(clamp_max_tokens=True))
    assert engine.generate([5] * 20, max_tokens=65535)[0].max_tokens == 12
    assert engine.generate([5] * 32, max_tokens=65535) == []


def test_max_tokens_by_default(make_engine: Callable) -> None:
    engine = make_engine(generation=GenerationDefaults(max_new_tokens=9))
    assert engine.generate("a", max_tokens=None)[0].max_tokens == 255
    chat = engine.generate(chat=USER, max_tokens=None)[0]
    assert chat.max_tokens == 9
    assert engine.generate(chat=USER, max_tokens=50)[0].max_tokens == 50
    assert make_engine().generate(chat=USER, max_tokens=None)[0].max_tokens > 200


def test_what_the_kv_cache_can_never_hold(make_engine: Callable) -> None:
    engine = make_engine(max_model_len=256)
    engine.core.handle(EngineReady(num_blocks=[4], max_sequence_tokens=64))
    for prompt, most in (([5] * 64, None), ([5] * 60, 5), ([5] * 100, 1)):
        assert engine.generate(prompt, max_tokens=most) == []
        assert engine.failed().status == 400
        assert "KV cache" in engine.failed().message
        assert "64" in engine.failed().message
    assert engine.generate([5] * 60, max_tokens=None)[0].max_tokens == 4
    assert engine.generate([5] * 60, max_tokens=4)[0].max_tokens == 4


def test_truncation_keeps_the_last_tokens(make_engine: Callable) -> None:
    engine = make_engine(max_model_len=32)
    (submit,) = engine.generate(list(range(100)), truncate_prompt_tokens=5)
    assert ints(submit.token_ids) == [95, 96, 97, 98, 99]
    text = "The quick brown fox. " * 40
    (submit,) = engine.generate(text, truncate_prompt_tokens=5)
    assert ints(submit.token_ids) == engine.core.vocabulary.encode(text)[-5:]


def test_truncation_to_what_fits(make_engine: Callable) -> None:
    engine = make_engine(max_model_len=32)
    prompt = list(range(100))
    for most, kept in ((10, 22), (31, 1), (None, 31)):
        (submit,) = engine.generate(prompt, truncate_prompt_tokens=-1, max_tokens=most)
        assert ints(submit.token_ids) == prompt[-kept:]
    (submit,) = engine.generate([1, 2, 3], truncate_prompt_tokens=-1, max_tokens=4)
    assert ints(submit.token_ids) == [1, 2, 3]
    assert engine.generate(prompt, truncate_prompt_tokens=-1, max_tokens=32) == []
    assert "32" in engine.failed().message
    engine.core.handle(EngineReady(num_blocks=[1], max_sequence_tokens=16))
    (submit,) = engine.generate(prompt, truncate_prompt_tokens=-1, max_tokens=4)
    assert ints(submit.token_ids) == prompt[-12:]


def test_empty_prompts(make_engine: Callable) -> None:
    engine = make_engine()
    for prompt in ("", [[]], [""], ["a", ""]):
        assert engine.generate(prompt) == []
        assert (engine.failed().status, engine.failed().param) == (400, "prompt")
    # With a BOS the empty text has a token.
    assert ints(make_engine("no_prefix").generate("")[0].token_ids) == [1]


def test_a_text_far_too_long_is_refused_without_encoding_it(make_engine: Callable) -> None:
    engine = make_engine()
    start = time.process_time()
    engine.generate("x" * 20_000_000)
    assert "at least" in engine.failed().message
    assert engine.failed().code == "context_length_exceeded"
    engine.generate(chat=[{"role": "user", "content": "<|im_end|>" * 300_000}])
    assert engine.failed().code == "context_length_exceeded"
    assert time.process_time() - start < 5


# ---------------------------------------------------------------------- shapes


def test_the_four_shapes_of_prompt(make_engine: Callable) -> None:
    engine = make_engine()
    encode = engine.core.vocabulary.encode
    assert [ints(s.token_ids) for s in engine.generate("ab")] == [encode("ab")]
    assert [ints(s.token_ids) for s in engine.generate(["a", "b"])] == [encode("a"), encode("b")]
    assert [ints(s.token_ids) for s in engine.generate([5, 6])] == [[5, 6]]
    assert [ints(s.token_ids) for s in engine.generate([[5], [6, 7]])] == [[5], [6, 7]]


def test_all_prompts_are_checked_before_any_is_submitted(make_engine: Callable) -> None:
    engine = make_engine(max_model_len=32)
    assert engine.generate([[5], [5] * 40]) == []
    assert len(engine.answers) == 1
    assert engine.core.open_requests == 0


def test_ids_of_sequences_are_in_a_row(make_engine: Callable) -> None:
    engine = make_engine()
    first, second = engine.generate(["a", "b"], n=3)
    assert first.seq_id >> 48 == 3
    assert second.seq_id == first.seq_id + 3
    assert (first.n, second.n) == (3, 3)
    assert engine.generate("c")[0].seq_id == first.seq_id + 6


def test_bos_is_added_once_and_only_when_asked(make_engine: Callable) -> None:
    engine = make_engine("no_prefix")
    assert ints(engine.generate("the")[0].token_ids)[0] == 1
    assert 1 not in ints(engine.generate("the", add_special_tokens=False)[0].token_ids)
    # A prompt that begins with BOS already is not changed.
    assert ints(engine.generate("<s>the")[0].token_ids)[:2] == [1, 1]


# ---------------------------------------------------------------------- sampling


def sampling(submits: list[Submit]) -> Any:
    return submits[0].sampling


def test_requests_win_over_the_checkpoints_defaults(make_engine: Callable) -> None:
    engine = make_engine(
        generation=GenerationDefaults(
            temperature=0.1, top_k=1, top_p=0.001, min_p=0.2, repetition_penalty=1.05
        )
    )
    spec = sampling(engine.generate(temperature=None))
    assert (spec.temperature, spec.top_k, spec.top_p) == (0.1, 1, 0.001)
    assert (spec.min_p, spec.repetition_penalty) == (0.2, 1.05)
    spec = sampling(
        engine.generate(temperature=2.0, top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    )
    assert (spec.temperature, spec.top_k, spec.top_p) == (2.0, 0, 1.0)
    assert (spec.min_p, spec.repetition_penalty) == (0.0, 1.0)
    spec = sampling(make_engine().generate(temperature=None))
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (1.0, 0, 1.0, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_cold_is_greedy(make_engine: Callable, temperature: float) -> None:
    spec = sampling(make_engine().generate(temperature=temperature, top_k=5, top_p=0.5, min_p=0.1))
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (0.0, 0, 1.0, 0.0)
    assert sampling(make_engine().generate(temperature=1e-4)).temperature == 1e-4


def test_top_p_0_keeps_the_best_token(make_engine: Callable) -> None:
    spec = sampling(make_engine().generate(temperature=1.0, top_p=0.0))
    assert (spec.top_k, spec.top_p) == (1, 1.0)


def test_ids_banned_before_min_tokens(make_engine: Callable) -> None:
    engine = make_engine(eos=(2, 7))
    (submit,) = engine.generate(min_tokens=3, stop_token_ids=[9, 2])
    assert ints(submit.sampling.banned_until_min) == [2, 7, 9]
    assert submit.stop_token_ids == [9, 2]
    assert sampling(engine.generate(stop_token_ids=[9])).banned_until_min == b""


def test_ignore_eos_leaves_the_clients_stop_ids(make_engine: Callable) -> None:
    (submit,) = make_engine().generate(ignore_eos=True, stop_token_ids=[9])
    assert (submit.ignore_eos, submit.stop_token_ids) == (True, [9])


def test_columns_of_bias_and_allowed_ids(make_engine: Callable) -> None:
    bias = {3: -1.5, 511: 100.0}
    spec = sampling(make_engine().generate(logit_bias=bias, allowed_token_ids=[9, 4, 9]))
    assert ints(spec.bias_ids) == [3, 511]
    assert struct.unpack("<2f", spec.bias_values) == (-1.5, 100.0)
    assert ints(spec.allowed_ids) == [4, 9]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "no_prefix", "metaspace"])
def test_bad_words_with_and_without_a_space(make_engine: Callable, kind: str) -> None:
    engine = make_engine(kind)
    spec = sampling(engine.generate(bad_words=["the"]))
    vocabulary = engine.core.vocabulary
    texts = {"".join(vocabulary.token(i) or "" for i in ints(word)) for word in spec.bad_words}
    assert texts in ({"the", "Ġthe"}, {"the", "▁the"})


def test_other_fields_of_a_submission(make_engine: Callable) -> None:
    (submit,) = make_engine().generate(priority=-3, cache_salt="é", logprobs=2, prompt_logprobs=4)
    assert (submit.priority, submit.cache_salt) == (-3, "é".encode())
    assert (submit.arrival, submit.max_tokens) == (1.5, 16)
    assert (submit.sampling.logprobs, submit.sampling.prompt_logprobs) == (2, 4)


def test_a_chat_without_template(make_engine: Callable) -> None:
    engine = make_engine(chat_template=None)
    assert engine.generate(chat=USER) == []
    assert engine.failed().status == 400
    assert "--chat-template" in engine.failed().message
    assert len(engine.generate("completions still work")) == 1


def test_the_flags_template_rules(make_engine: Callable) -> None:
    engine = make_engine(chat_template_flag="FLAG {{ messages[0].content }}")
    (submit,) = engine.generate(chat=USER)
    assert (
        engine.core.vocabulary.decode(ints(submit.token_ids), skip_special_tokens=False)
        == "FLAG Hi"
    )


def test_a_flag_that_is_no_template_stops_the_start(make_engine: Callable) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template is not valid: .* \(line 1\)"):
        make_engine(chat_template_flag="{% for %}")


def test_a_chat_is_encoded_without_further_bos(make_engine: Callable) -> None:
    engine = make_engine("no_prefix", chat_template="{{ bos_token }}{{ messages[0].content }}")
    (submit,) = engine.generate(chat=ChatPrompt(USER))
    assert ints(submit.token_ids).count(1) == 1
