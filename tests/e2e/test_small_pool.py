"""A KV cache smaller than the context length: CASES 47 and 48."""

from typing import Any

import pytest

POOL_BLOCKS, BLOCK = 12, 16
PREEMPTIONS = "vllm:num_preemptions"

LONG_RUNS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5},
    {"logprobs": 1},
    {"stop": ["zebra", "1999"]},
]


def ids(length: int) -> list[int]:
    return [(41 * i) % 40000 + 100 for i in range(length)]


def test_case_47_a_prompt_that_never_fits(small_pool: Any) -> None:
    for stream in (False, True):
        answer = small_pool.complete(ids(450), max_tokens=4, stream=stream)
        assert answer.status == 400, (answer.status, answer.body)
        message = answer.json["error"]["message"]
        assert "451" in message and str((POOL_BLOCKS - 1) * BLOCK) in message  # less the null block
        small_pool.assert_good()


def test_case_47_growth_that_never_fits_does_not_block_the_others(small_pool: Any) -> None:
    growing = (ids(150), {"max_tokens": 60, "ignore_eos": True})
    short = ("The capital of France is", {"max_tokens": 4})
    expected = small_pool.complete(short[0], **short[1]).text
    grown, *others = small_pool.together([growing, short, short, short])
    assert [answer.text for answer in others] == [expected] * 3
    if grown.status == 200:
        usage = grown.json["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] <= POOL_BLOCKS * BLOCK + 1
        assert grown.json["choices"][0]["finish_reason"] == "length"
    else:
        assert grown.status == 400 and grown.json["error"]["code"] == "context_length_exceeded"
    small_pool.assert_good()


REQUESTS = [
    (f"Chapter {i}. The sailor said that", {"max_tokens": 40, "ignore_eos": True, **fields})
    for i, fields in enumerate(LONG_RUNS)
]


@pytest.fixture(scope="module")
def solo(small_pool: Any) -> list[Any]:
    return [small_pool.complete(prompt, **fields) for prompt, fields in REQUESTS]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_case_48_preemption_does_not_change_answers(
    small_pool: Any, solo: list[Any], stream: bool
) -> None:
    before = small_pool.metric(PREEMPTIONS)
    answers = small_pool.together([(p, {**f, "stream": stream}) for p, f in REQUESTS])
    assert small_pool.metric(PREEMPTIONS) > before
    for answer, alone in zip(answers, solo, strict=True):
        assert answer.status == alone.status == 200
        assert (answer.streamed_text if stream else answer.text) == alone.text
    if not stream:
        for answer, alone in zip(answers, solo, strict=True):
            assert (
                answer.json["usage"]["completion_tokens"]
                == (alone.json["usage"]["completion_tokens"])
            )
        logprobs = [a[4].json["choices"][0]["logprobs"]["token_logprobs"] for a in (answers, solo)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
