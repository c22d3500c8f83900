"""A mixture of experts made of codes, in Triton's interpreter, against references in float64."""

from dataclasses import replace

import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from kernel_cases_quantized import QuantizedCase, random_codes  # noqa: E402
from zlm.kernels import moe, moe_plan, quantized_codes, quantized_moe  # noqa: E402
from zlm.kernels.moe import Activation  # noqa: E402
from zlm.kernels.quantized_moe import ExpertCodes  # noqa: E402

COUNT, CHOSEN, HIDDEN, WIDTH = 5, 2, 64, 32


def random_experts(kind: str, *, biases: bool) -> ExpertCodes:
    """Return experts of a kind of the cases, or of e2m1 codes ("mxfp4")."""
    generator = torch.Generator().manual_seed(1)

    def codes(rows: int, columns: int, seed: int) -> quantized_codes.Codes:
        stored = "w4" if kind == "mxfp4" else kind
        group = 32 if kind in ("mxfp4", "w4z") else 0
        made = random_codes(QuantizedCase(stored, 1, COUNT * rows, columns, group), "cpu", seed)
        return replace(made, zero=0, floats=True) if kind == "mxfp4" else made

    def bias(*shape: int) -> torch.Tensor | None:
        return torch.randn(shape, generator=generator) if biases else None

    return ExpertCodes(
        codes(2 * WIDTH, HIDDEN, 2),
        codes(HIDDEN, WIDTH, 3),
        bias(COUNT, 2 * WIDTH),
        bias(COUNT, HIDDEN),
    )


@pytest.mark.parametrize(
    ("kind", "tokens", "activation", "biases", "of_inputs"),
    [
        ("w4z", 1, Activation("silu"), False, False),
        ("fp8", 23, Activation("gelu_tanh"), False, False),
        ("mxfp4", 23, Activation("clamped", 1.5, 1.7), True, False),
        ("fp8", 23, Activation("silu"), True, True),
    ],
)
def test_mixture(
    kind: str, tokens: int, activation: Activation, biases: bool, of_inputs: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    logits = torch.randn(tokens, COUNT, generator=generator) * 5
    weights = random_experts(kind, biases=biases)
    pairs, rows = tokens * CHOSEN, quantized_moe.tile_rows(tokens * CHOSEN, COUNT, fixed=False)
    experts, shares = torch.empty(tokens, CHOSEN, dtype=torch.int32), torch.empty(tokens, CHOSEN)
    moe_plan.route(logits, normalize=True, experts=experts, shares=shares)
    order = torch.empty(pairs, dtype=torch.int32)
    tiles = torch.empty(moe_plan.num_tiles(pairs, COUNT, rows), 3, dtype=torch.int32)
    moe_plan.plan(experts, COUNT, rows, order=order, tiles=tiles)
    gated = torch.full((pairs, WIDTH), float("nan"))
    read, given = (shares, None) if of_inputs else (None, shares)
    quantized_moe.inner(x, weights, order, tiles, rows, activation, out=gated, shares=read)
    results = torch.full((pairs, HIDDEN), float("nan"))
    quantized_moe.outer(gated, weights, given, order, tiles, rows, out=results)
    out = torch.zeros(x.shape)
    moe.combine(results, out, out=out)
    spread = weights.spread(COUNT)
    wanted = moe.reference(x, experts, shares, spread, activation, of_inputs=of_inputs)
    assert float((out - wanted).norm() / wanted.norm()) < 1e-5
