"""Runs of real checkpoints on the GPU: determinism to the bit, sampling as on the CPU, aborts."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import real_prompts
from real_prompts import SMALL_POOL_BLOCKS, TEXTS, ids_of, values_of

from zlm import LLM, SamplingParams
from zlm.outputs import RequestOutput

COMPANY = 31  # sequences that run at once when determinism is tried
TOLERANCE = 1e-3  # of log-probabilities, between CPU and GPU

# ----------------------------------------------------------------------------------- deterministic


def settings_of_determinism() -> list[SamplingParams]:
    """Greedy and drawn, most with values to compare."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.9, "logprobs": 0},
        {"temperature": 1.0, "top_p": 0.9},
    ]
    return [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=i, **kinds[i % len(kinds)])
        for i in range(len(TEXTS))
    ]


@pytest.fixture(scope="module")
def open_fixed(open_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        options = {"max_num_seqs": COMPANY + 1, "dtype": "bfloat16", **options}
        return open_llm(deterministic=True, **options)

    return make


@pytest.fixture(scope="module")
def fixed(open_fixed: Callable[..., LLM]) -> Iterator[LLM]:
    with open_fixed() as llm:
        yield llm


@pytest.fixture(scope="module")
def fixed_alone(fixed: LLM) -> list[RequestOutput]:
    return real_prompts.one_by_one(fixed, TEXTS, settings_of_determinism())


def assert_same_bits(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for index, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert ids_of(output) == ids_of(wanted), f"prompt {index}"
        got, values = output.outputs[0].logprobs, wanted.outputs[0].logprobs
        assert (got is None) == (values is None)
        if values is not None:
            assert values_of(got) == values_of(values), f"prompt {index}"


def test_deterministic_in_company(fixed: LLM, fixed_alone: list[RequestOutput]) -> None:
    others = [f"Chapter {i}. The sailor said that" for i in range(COMPANY - len(TEXTS))]
    drawn = [SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logprobs=1)]
    params = settings_of_determinism() + drawn * len(others)
    outputs = fixed.generate([*TEXTS, *others], params, use_tqdm=False)
    assert_same_bits(outputs[: len(TEXTS)], fixed_alone)


@pytest.mark.parametrize(
    "way",
    [
        {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 300, "num_gpu_blocks_override": SMALL_POOL_BLOCKS},
        {"enforce_eager": True},
    ],
    ids=["chunks-64", "small-pool", "eager"],
)
def test_deterministic_in_every_way(
    way: dict[str, Any], open_fixed: Callable[..., LLM], fixed_alone: list[RequestOutput]
) -> None:
    with open_fixed(**way) as llm:
        outputs = llm.generate(TEXTS, settings_of_determinism(), use_tqdm=False)
        assert_same_bits(outputs, fixed_alone)
        if "num_gpu_blocks_override" in way:
            assert llm.stats().preemptions > 0


# ---------------------------------------------------------------------------------------- sampling


def common_length(a: list[int], b: list[int]) -> int:
    """Return how many tokens two answers begin with alike."""
    pairs = zip(a, b, strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(a))


def assert_close(got: Any, wanted: Any, count: int) -> None:
    """Compare the log-probabilities of the first *count* positions."""
    assert (got is None) == (wanted is None)
    if wanted is None:
        return
    mine, theirs = (values_of([p for p in each[:count] if p]) for each in (got, wanted))
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert next(iter(one)) == next(iter(other))  # the token itself stands first
        shared = one.keys() & other.keys()  # the last two of the best may change places
        assert len(shared) >= len(other) - 1
        assert all(one[i] == pytest.approx(other[i], abs=TOLERANCE) for i in shared)


def test_samples_are_the_cpus(llm: LLM, on_cpu: Any) -> None:
    """All but at most one answer of twenty: two draws may be as near as the logits' noise."""
    outputs = llm.generate(TEXTS, real_prompts.mixed(), use_tqdm=False)
    differing = 0
    for output, wanted in zip(outputs, on_cpu.mixed, strict=True):
        assert output.error is None and wanted.error is None
        count = common_length(ids_of(output), ids_of(wanted))
        differing += count < len(ids_of(wanted))
        assert_close(output.outputs[0].logprobs, wanted.outputs[0].logprobs, count)
        assert_close(output.prompt_logprobs, wanted.prompt_logprobs, len(wanted.prompt_token_ids))
    assert differing <= 1


def test_samples_do_not_depend_on_company_or_prefix_cache(llm: LLM, small_steps: LLM) -> None:
    params = real_prompts.mixed()
    together = llm.generate(TEXTS, params, use_tqdm=False)
    alone = real_prompts.one_by_one(llm, TEXTS, params)
    assert max(output.num_cached_tokens for output in alone) > 0
    real_prompts.assert_same_ids(alone, together)
    cold = small_steps.generate(TEXTS, params, use_tqdm=False)
    assert not any(output.num_cached_tokens for output in cold)
    real_prompts.assert_same_ids(cold, together)


def test_three_samples(llm: LLM, small_steps: LLM, on_cpu: Any) -> None:
    expected = [sample.token_ids for sample in on_cpu.three.outputs]
    assert len({tuple(ids) for ids in expected}) == 3
    for each in (llm, small_steps):
        output = each.generate(TEXTS[:1], real_prompts.THREE, use_tqdm=False)[0]
        assert [sample.token_ids for sample in output.outputs] == expected
        for sample, wanted in zip(output.outputs, on_cpu.three.outputs, strict=True):
            assert_close(sample.logprobs, wanted.logprobs, len(wanted.token_ids))


# ------------------------------------------------------------------------------------------ aborts


class StopsAtTheFirst:
    """A progress bar that interrupts the run when the first prompt is done."""

    def __init__(self, **_: Any) -> None:
        pass

    def update(self, _: int) -> None:
        raise KeyboardInterrupt

    def set_postfix_str(self, _: str) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("which", ["llm", "small_steps"])
def test_aborted_while_running(which: str, request: pytest.FixtureRequest, on_cpu: Any) -> None:
    """Of forty sequences some run and some wait when they are aborted; no block is lost."""
    llm: LLM = request.getfixturevalue(which)
    before = llm.stats()
    long = SamplingParams(temperature=0.8, max_tokens=900, ignore_eos=True)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            llm.generate(
                [TEXTS[5]] * 41, [real_prompts.greedy(), *[long] * 40], use_tqdm=StopsAtTheFirst
            )
    after = llm.stats()
    assert after.success["abort"] == before.success.get("abort", 0) + 80
    assert (after.num_running, after.num_waiting, after.kv_usage) == (0, 0, 0.0)
    again = llm.generate(TEXTS, real_prompts.greedy(), use_tqdm=False)
    real_prompts.assert_same_ids(again, on_cpu.greedy)
