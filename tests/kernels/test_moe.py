"""A mixture of experts in Triton's interpreter, against references in float64 (CASES 109)."""

import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from kernel_cases_gemm import relative_error  # noqa: E402
from kernel_cases_moe import CLAMPED, MixtureCase, mixture_both, planned, routed  # noqa: E402
from zlm.kernels import moe_plan  # noqa: E402
from zlm.kernels.moe import Activation  # noqa: E402


@pytest.mark.parametrize("how", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("count", "chosen"), [(5, 2), (60, 4), (1, 1), (4, 4)])
def test_routing(count: int, chosen: int, how: tuple[bool, bool]) -> None:
    """Shares are those of softmax, or sigmoid, and top-k, with all logits far below 0 too."""
    logits = torch.randn(7, count, generator=torch.Generator().manual_seed(count)) * 3
    for shifted in (logits, logits - 50):
        experts, shares = routed(shifted, chosen, *how)
        wanted, numbers = moe_plan.reference(shifted, chosen, *how)
        assert torch.equal(experts.long(), numbers)
        torch.testing.assert_close(shares.double(), wanted, rtol=1e-6, atol=1e-7)


def test_routing_of_what_is_no_number() -> None:
    """Rows of padding hold anything: experts are in range and distinct all the same."""
    logits = torch.tensor([[1.0, 2.0, 0.5]]).repeat(5, 1)
    logits[0], logits[1, 1] = float("nan"), float("nan")
    logits[2], logits[3] = float("inf"), float("-inf")
    logits[4, 0], logits[4, 2] = float("inf"), float("-inf")
    experts, _ = routed(logits, 2)
    assert experts.min() >= 0 and experts.max() < 3
    assert (experts[:, 0] != experts[:, 1]).all()
    assert experts[1].tolist() == [0, 2] and experts[4].tolist() == [0, 1]


@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (3, 4), (40, 4), (40, 16)])
def test_plan(tokens: int, rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair is in one tile, of its own expert; those of an expert keep their order."""
    monkeypatch.setattr(moe_plan, "CHUNK", chunk)
    count, chosen = 6, 2
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, count - 1, generator=generator).topk(chosen).indices.int()
    experts[experts == 2] = count - 1  # one that nobody chooses
    order, tiles = planned(experts, count, rows)
    assert torch.equal(order.long(), experts.flatten().argsort(stable=True))
    used = tiles[tiles[:, 0] >= 0]
    assert (tiles[len(used) :, 0] == -1).all() and (used[:, 2] <= rows).all()
    covered = []
    for expert, first, pairs in used.tolist():
        members = order[first : first + pairs].long()
        assert (experts.flatten()[members] == expert).all()
        covered += members.tolist()
    assert covered == order.tolist()


@pytest.mark.parametrize(
    "case",
    [
        MixtureCase(1, 5, 2, 40, 24),
        MixtureCase(23, 5, 2, 40, 24, activation=CLAMPED, biases=True),
        MixtureCase(23, 5, 2, 40, 24, activation=Activation("gelu_tanh")),
        MixtureCase(23, 5, 2, 40, 24, biases=True, of_inputs=True),
    ],
    ids=str,
)
def test_mixture(case: MixtureCase) -> None:
    out, expected = mixture_both(case, torch.float32, "cpu")
    assert relative_error(out, expected) < 1e-6


def test_mixture_in_float16() -> None:
    out, expected = mixture_both(MixtureCase(70, 3, 1, 32, 16), torch.float16, "cpu")
    assert relative_error(out, expected) < 2e-3
