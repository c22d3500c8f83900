"""Cases of mixtures of experts, plain and made of codes: all five launches beside the reference.

``tests/kernels`` runs small ones in Triton's interpreter, ``tests/gpu`` real ones compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from kernel_cases_quantized import QuantizedCase, random_codes
from torch import Tensor
from zlm.kernels import moe, moe_plan, quantized_moe
from zlm.kernels.moe import Activation, ExpertTensors
from zlm.kernels.quantized_codes import Codes
from zlm.kernels.quantized_moe import ExpertCodes

SILU, CLAMPED = Activation("silu"), Activation("clamped", 1.5, 1.7)
GROUPS = {"mxfp4": 32, "w4": 32, "w4z": 32, "blocks": 128}  # of a kind; others: a scale a row


@dataclass(frozen=True)
class MixtureCase:
    """*tokens* with the *chosen* best of *count* experts, [width, hidden] each.

    kind: of their codes, as ``QuantizedCase`` has them, or e2m1 ("mxfp4"), or e4m3 with a scale for
    128 columns ("blocks"); empty: plain weights. of_inputs: shares multiply what experts read.
    """

    tokens: int
    count: int
    chosen: int
    hidden: int
    width: int
    kind: str = ""
    activation: Activation = SILU
    biases: bool = False
    of_inputs: bool = False

    def __str__(self) -> str:
        experts = f"{self.chosen}of{self.count}-{self.hidden}x{self.width}"
        parts = [self.kind, f"{self.tokens}-{experts}", self.activation.name]
        parts += [name for name in ("biases", "of_inputs") if getattr(self, name)]
        return "-".join(filter(None, parts))


def routed(
    logits: Tensor, chosen: int, normalize: bool = True, sigmoid: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (experts, shares) of router logits."""
    shape, device = (logits.shape[0], chosen), logits.device
    experts = torch.full(shape, -7, dtype=torch.int32, device=device)
    shares = torch.full(shape, float("nan"), device=device)
    how = {"normalize": normalize, "sigmoid": sigmoid}
    moe_plan.route(logits, experts=experts, shares=shares, **how)
    return experts, shares


def planned(experts: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return (order, tiles) of *experts* in tiles of *rows*."""
    pairs = experts.numel()
    order = torch.full((pairs,), -7, dtype=torch.int32, device=experts.device)
    size = moe_plan.num_tiles(pairs, count, rows), moe_plan.TILE_INTS
    tiles = torch.full(size, -7, dtype=torch.int32, device=experts.device)
    moe_plan.plan(experts, count, rows, order=order, tiles=tiles)
    return order, tiles


def weights_of(
    case: MixtureCase, dtype: torch.dtype, device: str
) -> tuple[ExpertTensors | ExpertCodes, ExpertTensors]:
    """Return random experts, and what they stand for."""
    count, hidden, width = case.count, case.hidden, case.width
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    biases = (random(count, 2 * width), random(count, hidden)) if case.biases else (None, None)
    if not case.kind:
        both = random(count, 2 * width, hidden) * hidden**-0.5
        down = random(count, hidden, width) * width**-0.5
        plain = ExpertTensors(both.to(dtype), down.to(dtype), *biases)
        return plain, plain
    made = ExpertCodes(
        _codes(case.kind, count * 2 * width, hidden, device, 2),
        _codes(case.kind, count * hidden, width, device, 3),
        *biases,
    )
    return made, made.spread(count)


def _codes(kind: str, rows: int, columns: int, device: str, seed: int) -> Codes:
    stored = {"mxfp4": "w4", "blocks": "fp8"}.get(kind, kind)
    case = QuantizedCase(stored, 1, rows, columns, GROUPS.get(kind, 0))
    made = random_codes(case, device, seed)
    return replace(made, zero=0, floats=True) if kind == "mxfp4" else made


def mixture_both(
    case: MixtureCase, dtype: torch.dtype, device: str, *, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (kernels' result, reference) of the mixture, added to zeros."""
    generator = torch.Generator(device).manual_seed(2)
    shape = case.tokens, case.hidden
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    logits = torch.randn(case.tokens, case.count, generator=generator, device=device) * 5 - 50
    weights, meaning = weights_of(case, dtype, device)
    experts, shares = routed(logits, case.chosen, sigmoid=case.of_inputs)
    out = torch.ones(shape, device=device)
    mixed(case, x, weights, experts, shares, fixed=fixed)(out)
    how = {"of_inputs": case.of_inputs}
    wanted = moe.reference(x, experts, shares, meaning, case.activation, **how)
    return out - 1, wanted


def mixed(
    case: MixtureCase,
    x: Tensor,
    weights: ExpertTensors | ExpertCodes,
    experts: Tensor,
    shares: Tensor,
    *,
    fixed: bool,
) -> Callable[[Tensor], None]:
    """Return what adds the mixture of *x* to a tensor."""
    pairs = experts.numel()
    setting: tuple[int, ...]
    if isinstance(weights, ExpertCodes):
        kernels, setting = quantized_moe, quantized_moe.tile_setting(pairs, case.count, fixed=fixed)
    else:
        kernels, setting = moe, moe.tile_setting(x.dtype, pairs, case.count, fixed=fixed)
    order, tiles = planned(experts, case.count, setting[0])
    read, given = (shares, None) if case.of_inputs else (None, shares)
    gated = torch.full((pairs, case.width), float("nan"), dtype=x.dtype, device=x.device)
    results = torch.full((pairs, case.hidden), float("nan"), dtype=x.dtype, device=x.device)
    inner = partial(kernels.inner, x, weights, order, tiles, setting, case.activation)

    def add(out: Tensor) -> None:
        inner(out=gated, shares=read)
        kernels.outer(gated, weights, given, order, tiles, setting, out=results)
        moe.combine(results, out, out=out)

    return add
