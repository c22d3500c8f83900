"""``LLM.stream`` and ``stream_chat``: outputs as they come, in the form that is asked for."""

import gc
from itertools import pairwise

import pytest
from running_server import eventually_true

from zlm import LLM, RequestOutputKind, SamplingParams
from zlm.errors import TooLong

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
DELTAS = SamplingParams(
    temperature=0, max_tokens=12, logprobs=1, output_kind=RequestOutputKind.DELTA
)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def test_all_so_far_and_what_is_new(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    seen = list(llm.stream(PROMPT, GREEDY))
    texts = [output.outputs[0].text for output in seen]
    assert len(texts) > 4 and all(b.startswith(a) for a, b in pairwise(texts))
    assert seen[-1].outputs == whole.outputs
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert {output.prompt for output in seen} == {PROMPT}
    assert all(output.prompt_token_ids == whole.prompt_token_ids for output in seen)
    deltas = [output.outputs[0] for output in llm.stream(PROMPT, DELTAS)]
    assert len(deltas) > 4 and "".join(d.text for d in deltas) == whole.outputs[0].text
    assert [t for d in deltas for t in d.token_ids] == whole.outputs[0].token_ids
    assert [p for d in deltas for p in d.logprobs or []] == whole.outputs[0].logprobs
    final = SamplingParams(
        temperature=0, max_tokens=12, logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY
    )
    [last] = llm.stream(PROMPT, final)
    assert last.outputs == whole.outputs


def test_samples_and_conversations(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    texts = ["", "", ""]
    for output in llm.stream(PROMPT, params):
        for part in output.outputs:
            texts[part.index] += part.text
    [whole] = llm.generate(PROMPT, params, use_tqdm=False)
    assert texts == [sample.text for sample in whole.outputs] and len(set(texts)) == 3
    messages = [{"role": "user", "content": "What is the capital of France? One word."}]
    *_, last = llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=16))
    assert "Paris" in last.outputs[0].text and last.outputs[0].finish_reason == "stop"
    assert last.prompt is not None and last.prompt.endswith("<|im_start|>assistant\n")


def test_streams_and_other_calls_side_by_side(llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs
    first, second = llm.stream(PROMPT, GREEDY), llm.stream("1, 2, 3,", GREEDY)
    next(first)
    next(second)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs == expected
    *_, last = first
    assert last.outputs == expected
    *_, counted = second
    assert counted.outputs[0].text.startswith(" 4, 5")


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    for leave in ("close", "collect"):
        before = llm.stats().success.get("abort", 0)
        stream = llm.stream(PROMPT, ENDLESS)
        next(stream)
        assert llm._engine.num_open == 1
        if leave == "close":
            stream.close()  # type: ignore[attr-defined]
        else:
            del stream
            gc.collect()
        assert llm._engine.num_open == 0
        assert eventually_true(
            lambda before=before: llm.stats().success.get("abort", 0) == before + 1, 20
        )
    assert "Paris" in llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_a_refusal_is_raised_at_the_first_step(llm: LLM) -> None:
    stream = llm.stream([5] * 600, GREEDY)
    with pytest.raises(TooLong, match="512"):
        next(stream)
