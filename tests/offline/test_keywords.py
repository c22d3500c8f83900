"""``LLM``'s keywords on how a GPU computes reach the configuration. No process is started."""

from typing import Any

import pytest

from zlm.config import ComputeOptions, Config
from zlm.errors import ConfigError
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


@pytest.mark.parametrize("keywords", [{"attention_backend": "FLASH_ATTN"}, {"deterministic": 2}])
def test_wrong_ones_are_told(configs: list[Config], keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keywords))):
        LLM("m", **keywords)
    assert not configs
