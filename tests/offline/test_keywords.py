"""``LLM``'s keywords on how a GPU computes reach the configuration. No process is started."""

from typing import Any

import pytest

from zlm.config import ComputeOptions, Config
from zlm.llm import LLM


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What engines were asked for; none is started."""
    asked: list[Config] = []

    class Engine:
        def __init__(self, config: Config) -> None:
            asked.append(config)

        def close(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr("zlm.llm.OfflineEngine", Engine)
    return asked


def test_keywords_of_computing(configs: list[Config]) -> None:
    LLM("m", enforce_eager=True, deterministic=True, attention_backend="sdpa", device="cuda")
    LLM("m")
    first, second = configs
    assert first.parallel.device == "cuda"
    assert first.compute == ComputeOptions(
        enforce_eager=True, deterministic=True, attention_backend="sdpa"
    )
    assert second.compute == ComputeOptions()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"attention_backend": "FLASH"}, "must be 'auto' or 'triton' or 'sdpa', got 'FLASH'"),
        ({"deterministic": 2}, "must be True or False, got 2"),
        ({"max_model_len": "abc"}, "must be an integer or 'auto' or None, got 'abc'"),
        ({"scheduling_policy": 5}, "must be 'fcfs' or 'priority', got 5"),
        ({"model": None}, "must be a string, got None"),
    ],
    ids=str,
)
def test_wrong_ones_are_told(configs: list[Config], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(keywords))} {message}"):
        LLM(**{"model": "m", **keywords})
    assert not configs


@pytest.mark.parametrize(
    ("keyword", "reason"),
    [
        ("enable_lora", ", which zlm does not have: adapters come"),
        (
            "enable_expert_parallel",
            ", which zlm does not have: --tensor-parallel-size gives each GPU a part of every",
        ),
        ("nnodes", ": several machines are for `zlm serve`"),
    ],
)
def test_a_keyword_of_vllm_alone_is_told_with_the_reason(
    configs: list[Config], keyword: str, reason: str
) -> None:
    options: dict[str, Any] = {keyword: 2}
    with pytest.raises(TypeError, match=f"{keyword!r}{reason}"):
        LLM("m", **options)
    assert not configs


def test_workers_are_of_this_machine(configs: list[Config]) -> None:
    LLM("m", distributed_executor_backend="mp")
    LLM("m", distributed_executor_backend=None)
    options: dict[str, Any] = {"distributed_executor_backend": "ray"}
    with pytest.raises(ValueError, match=r"must be 'mp', got 'ray': .* are for `zlm serve`"):
        LLM("m", **options)
    assert len(configs) == 2
