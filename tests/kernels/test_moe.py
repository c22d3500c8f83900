"""A mixture of experts in Triton's interpreter, against references in float64 (CASES 109)."""

import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from zlm.kernels import moe, moe_plan  # noqa: E402
from zlm.kernels.moe import Activation, ExpertTensors  # noqa: E402


def routed(
    logits: torch.Tensor, chosen: int, normalize: bool = True, sigmoid: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits.shape[0], chosen
    experts, shares = torch.full(shape, -7, dtype=torch.int32), torch.full(shape, float("nan"))
    how = {"normalize": normalize, "sigmoid": sigmoid}
    moe_plan.route(logits, experts=experts, shares=shares, **how)
    return experts, shares


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


def planned(experts: torch.Tensor, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = experts.numel()
    order = torch.full((pairs,), -7, dtype=torch.int32)
    tiles = torch.full((moe_plan.num_tiles(pairs, count, rows), 3), -7, dtype=torch.int32)
    moe_plan.plan(experts, count, rows, order=order, tiles=tiles)
    return order, tiles


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


def check_mixture(
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: ExpertTensors,
    chosen: int,
    activation: Activation,
    of_inputs: bool = False,
) -> None:
    """Compare the mixture of x, by all five launches, with the reference."""
    setting = moe.tile_setting(x.dtype, x.shape[0] * chosen, logits.shape[1], fixed=False)
    experts, shares = routed(logits, chosen, sigmoid=of_inputs)
    order, tiles = planned(experts, logits.shape[1], setting[0])
    read, given = (shares, None) if of_inputs else (None, shares)
    pairs, (hidden, width) = experts.numel(), weights.down.shape[1:]
    gated = torch.full((pairs, width), float("nan"), dtype=x.dtype)
    moe.inner(x, weights, order, tiles, setting, activation, out=gated, shares=read)
    results = torch.full((pairs, hidden), float("nan"), dtype=x.dtype)
    moe.outer(gated, weights, given, order, tiles, setting, out=results)
    out = torch.ones(x.shape)
    moe.combine(results, out, out=out)
    wanted = moe.reference(x, experts, shares, weights, activation, of_inputs=of_inputs)
    error = (out - 1 - wanted).abs().max() / wanted.abs().max()
    assert error < (1e-6 if x.dtype == torch.float32 else 1e-2), error


def random_weights(count: int, hidden: int, width: int, biases: bool) -> ExpertTensors:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return ExpertTensors(
        random(count, 2 * width, hidden),
        random(count, hidden, width),
        random(count, 2 * width) if biases else None,
        random(count, hidden) if biases else None,
    )


@pytest.mark.parametrize(
    ("tokens", "activation", "biases"),
    [
        (1, Activation("silu"), False),
        (23, Activation("clamped", 1.5, 1.7), True),
        (23, Activation("gelu_tanh"), False),
    ],
    ids=["silu", "clamped-biases", "gelu"],
)
def test_mixture(tokens: int, activation: Activation, biases: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 40, generator=generator)
    logits = torch.randn(tokens, 5, generator=generator) * 5 - 50
    check_mixture(x, logits, random_weights(5, 40, 24, biases), 2, activation)


def test_shares_of_what_experts_read() -> None:
    generator = torch.Generator().manual_seed(2)
    x, logits = torch.randn(23, 40, generator=generator), torch.randn(23, 5, generator=generator)
    weights = random_weights(5, 40, 24, biases=True)
    check_mixture(x, logits, weights, 2, Activation("silu"), of_inputs=True)


def test_mixture_in_float16() -> None:
    generator = torch.Generator().manual_seed(2)
    x, logits = torch.randn(70, 32, generator=generator), torch.randn(70, 3, generator=generator)
    wide = random_weights(3, 32, 16, biases=False)
    weights = ExpertTensors(wide.gate_up.half(), wide.down.half())
    check_mixture(x.half(), logits, weights, 1, Activation("silu"))
