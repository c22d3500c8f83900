"""``LLM.generate`` and ``LLM.chat``: forms of prompts, shapes of answers, refusals."""

from collections.abc import Callable
from typing import Any

import pytest

from zlm import LLM, SamplingParams
from zlm.errors import BadRequest, TooLong
from zlm.outputs import Logprob

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "The capital of France is"


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_every_form_of_prompt_gives_the_same_answer(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert "Paris" in output.outputs[0].text and output.prompt == PROMPT
    ids = output.prompt_token_ids
    forms: list[Any] = [
        [PROMPT],
        {"prompt": PROMPT},
        ids,
        [ids],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids, "cache_salt": "x"}],
    ]
    for form in forms:
        [again] = llm.generate(form, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        assert again.prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_outputs_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"{i}, {i + 1}, {i + 2}," for i in range(1, 24)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 5) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    assert texts(outputs)[0] == texts(llm.generate(prompts[0], params[0], use_tqdm=False))[0]
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_a_stop_string_and_the_limit_are_told_apart(llm: LLM) -> None:
    count = "1, 2, 3, 4, 5, 6, 7,"
    [stopped] = llm.generate(
        count, SamplingParams(temperature=0, max_tokens=32, stop="10"), use_tqdm=False
    )
    [cut] = llm.generate(count, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert stopped.outputs[0].text == " 8, 9, "
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "10")
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("length", None)


def test_samples_of_a_seeded_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12)
    [first], [second] = (llm.generate(PROMPT, params, use_tqdm=False) for _ in range(2))
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]
    assert len({sample.text for sample in first.outputs}) == 4
    assert [s.token_ids for s in first.outputs] == [s.token_ids for s in second.outputs]


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    sample = output.outputs[0]
    assert sample.logprobs is not None and len(sample.logprobs) == 4
    for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
        assert len(position) == 3 and next(iter(position)) == token
        assert isinstance(position[token], Logprob)
        assert [entry.rank for entry in position.values()] == [1, 2, 3]
    decoded = "".join(p[t].decoded_token or "" for t, p in zip(sample.token_ids, sample.logprobs))  # noqa: B905
    assert decoded == sample.text
    total = sum(p[t].logprob for t, p in zip(sample.token_ids, sample.logprobs, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and list(entry) == [token] and (entry[token].rank or 0) >= 1


def test_a_sampled_token_outside_the_alternatives_keeps_its_rank(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=16, logprobs=1, ignore_eos=True)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    positions = output.outputs[0].logprobs or []
    ranks = [p[t].rank or 0 for t, p in zip(output.outputs[0].token_ids, positions, strict=True)]
    assert max(ranks) > 1 and min(ranks) >= 1
    assert {len(position) for position in positions} <= {1, 2}


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? One word."}]
    params = SamplingParams(temperature=0, max_tokens=16)
    [one] = llm.chat(messages, params, use_tqdm=False)
    assert "Paris" in one.outputs[0].text and one.outputs[0].finish_reason == "stop"
    assert one.prompt is not None and one.prompt.endswith("<|im_start|>assistant\n")
    both = llm.chat([messages, messages], params, use_tqdm=False)
    assert texts(both) == texts([one]) * 2
    parts = [{"role": "user", "content": [{"type": "text", "text": messages[0]["content"]}]}]
    assert llm.chat(parts, params, use_tqdm=False)[0].prompt_token_ids == one.prompt_token_ids


def test_chat_continues_the_last_message(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    [output] = llm.chat(
        messages, GREEDY, add_generation_prompt=False, continue_final_message=True, use_tqdm=False
    )
    assert output.prompt is not None and output.prompt.endswith("The capital of France is")
    assert output.outputs[0].text.startswith(" Paris")
    with pytest.raises(BadRequest, match="add_generation_prompt"):
        llm.chat(messages, GREEDY, continue_final_message=True, use_tqdm=False)


def test_a_misspelt_option_is_named(llm: LLM) -> None:
    options = {"add_generaton_prompt": False}
    with pytest.raises(TypeError, match="did you mean 'add_generation_prompt'"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, **options)


def test_default_sampling_params(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    defaults.temperature, defaults.max_tokens = 0, 8
    assert texts(llm.generate(PROMPT, defaults, use_tqdm=False)) == texts(
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
    )
    [output] = llm.generate(PROMPT, use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_a_too_long_prompt_is_refused_by_its_index_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().prompt_tokens
    with pytest.raises(TooLong, match=r"prompt 2: .*512"):
        llm.generate([PROMPT, PROMPT, [5] * 600, PROMPT], GREEDY, use_tqdm=False)
    [output] = llm.generate("Roses are red, violets are", GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert llm.stats().prompt_tokens - before <= len(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([PROMPT, [5, 10**6]], "prompt 1"),
        ([[-1]], "prompt 0"),
        ([PROMPT, 7], "prompt 1"),
        ([[1.5]], "prompt 0"),
        ([{"text": "x"}], "prompt 0.*unknown key 'text'"),
        ([{"prompt": 5}], "prompt 0.*string"),
        ([{}], "prompt 0"),
        (5, "prompt 0.*got 5"),
        (None, "prompt 0.*got None"),
        (b"text", "prompt 0.*got b'text'"),
    ],
    ids=repr,
)
def test_bad_prompts(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], None),
        ("hello", "conversation 0"),
        (None, "conversation 0"),
        ([{"content": "x"}], r"messages\[0\].role is required"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text parts"),
        ([{"role": "usr", "content": "x"}], r"\[0\].role must be one of .* mean 'user'"),
        ([[], []], "conversation 0: messages must not be empty"),
        ([{"role": "user", "contnt": "x"}], "unknown field 'contnt'.* mean 'content'"),
    ],
    ids=["none", "string", "None", "no-role", "image", "role", "empty", "key"],
)
def test_bad_conversations(llm: LLM, messages: Any, message: str | None) -> None:
    if message is None:
        assert llm.chat(messages, GREEDY, use_tqdm=False) == []
        return
    with pytest.raises(BadRequest, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 5}, {"n": 0}, {"max_tokens": "x"},
     {"stop": 3}, {"stop": [3]}, {"repetition_penalty": "x"}],
    ids=str,
)  # fmt: skip
def test_wrong_parameters_are_refused_when_made(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be") as bad:
        SamplingParams(**wrong)
    assert isinstance(bad.value, BadRequest) and bad.value.param == name


def test_structured_outputs_may_be_a_dict(llm: LLM) -> None:
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["yes"]})  # type: ignore[arg-type]
    assert texts(llm.generate(PROMPT, params, use_tqdm=False)) == ["yes"]
    with pytest.raises(BadRequest, match=r"structured_outputs.*unknown field `chioce`"):
        SamplingParams(structured_outputs={"chioce": ["yes"]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(PROMPT, 5), "sampling_params must be SamplingParams, got 5"),
        (lambda llm: llm.generate(PROMPT, {"n": 1}), "sampling_params must be SamplingParams"),
        (lambda llm: llm.generate([PROMPT], [{"n": 1}]), r"sampling_params\[0\] must be Sampl"),
        (lambda llm: llm.generate(PROMPT, SamplingParams(n=None)), "n: expected a whole number"),
        (lambda llm: llm.generate(PROMPT, priority="x"), "priority must be a signed 64-bit"),
        (lambda llm: llm.generate(PROMPT, priority=2**63), "priority must be a signed 64-bit"),
        (lambda llm: llm.beam_search(PROMPT), "params must be BeamSearchParams, got None"),
        (lambda llm: llm.beam_search(PROMPT, GREEDY), "params must be BeamSearchParams, got S"),
        (lambda llm: llm.embed(PROMPT, pooling_params=5), "pooling_params must be PoolingParams"),
        (lambda llm: llm.score(5, "x"), "data_1 must be a text or a list"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], tools=5), "tools: expected a l"),
    ],
)
def test_arguments_of_another_type_harm_nothing(
    llm: LLM, call: Callable[[LLM], object], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        call(llm)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].finished


def test_bad_sampling_params(llm: LLM) -> None:
    changed = SamplingParams()
    changed.temperature = 3
    with pytest.raises(BadRequest, match=r"sampling_params: temperature .* 2") as bad:
        llm.generate(PROMPT, changed)
    assert bad.value.param == "temperature"
    with pytest.raises(BadRequest, match=r"sampling_params\[1\]: n must be between 1 and 128"):
        llm.generate([PROMPT] * 2, [GREEDY, SamplingParams(n=129)])
    with pytest.raises(BadRequest, match='runner="pooling"'):
        llm.embed(PROMPT)
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        llm.generate([PROMPT] * 2, [GREEDY])


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([PROMPT, "Hello"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "output tokens/s" in shown
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
