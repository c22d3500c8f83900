"""Which backend serves which card, and what is said where a flag asks for what a card cannot."""

import pytest
import torch

from zlm.errors import ConfigError
from zlm.ops.cpu import CpuOps
from zlm.ops.select import select

CUDA = torch.device("cuda")
OLD, NEW = (7, 5), (9, 0)


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A card of the given compute capability; it is asked for nothing else."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return request.param


def test_a_cpu_needs_no_triton() -> None:
    ops = select(torch.device("cpu"), torch.bfloat16, deterministic=True)
    assert isinstance(ops, CpuOps) and ops.dtype == torch.bfloat16


@pytest.mark.parametrize("card", [OLD, NEW], indirect=True, ids=["sm75", "sm90"])
def test_attention_is_chosen_by_the_card(card: tuple[int, int]) -> None:
    assert select(CUDA, torch.float16).needs_lengths is (card == OLD)  # sdpa does
    assert select(CUDA, torch.float16, attention="sdpa").needs_lengths


@pytest.mark.parametrize("card", [OLD], indirect=True, ids=["sm75"])
def test_what_an_old_card_cannot(card: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"--dtype bfloat16 needs .* 8\.0: this card has .* 7\.5"):
        select(CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match="--attention-backend triton needs"):
        select(CUDA, torch.float16, attention="triton")
    with pytest.raises(ConfigError, match="--deterministic needs"):
        select(CUDA, torch.float16, deterministic=True)
