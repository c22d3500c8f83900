"""A mixture of experts in the MLP's place: each token goes through some of many small MLPs.

Parameters: ``gate.weight`` [E, H], the router; ``experts.N.gate_proj``, ``up_proj`` [I, H] and
``down_proj`` [H, I] for N = 0 .. E - 1; or ``experts.gate_proj`` and so on of all experts in one
tensor [E, ...]; or ``experts.gate_up_proj`` [E, H, 2 I], whose columns are of gate and up by turns,
and ``experts.down_proj`` [E, I, H], the router then being ``router``; or the same with all columns
of gate first. Where there is an expert that all tokens have, ``shared_expert`` is a gated MLP and
``shared_expert_gate.weight`` [1, H], if there, says how much of it a token takes.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.layers.mlp import GatedMLP
from zlm.layers.parameters import Parameters
from zlm.ops.backend import ExpertWeights, Mixture, Norm, Product

LANES = 32  # numbers that torch computes at a time: fewer are computed another way
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class MixtureMLP:
    """Router, experts, and the shared expert if there is one."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        experts, ops = spec.experts, parameters.ops
        assert experts is not None, "a mixture without experts"
        mixture = Mixture(
            count=experts.count,
            chosen=experts.chosen,
            normalize=experts.normalize,
            activation="clamped" if experts.limit else spec.activation,
            limit=experts.limit,
            alpha=experts.alpha,
            sigmoid=experts.sigmoid,
        )
        self.parallel = parameters.parallel
        router = parameters.under("router" if experts.layout == "fused" else "gate")
        self.router = ops.linear(router["weight"], router.optional("bias"), wide=True)
        self.experts = ops.experts(mixture, READERS[experts.layout](parameters.under("experts")))
        self.shared: SharedExpert | None = None
        if experts.shared_size:
            self.shared = SharedExpert(parameters, spec, gated=experts.shared_gate)

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Return *residual*, which is used up, plus the mixture of the norm of x."""
        rows = norm(x)
        logits = self.router(rows)
        residual = self.parallel.once(residual)
        if self.shared is not None:
            residual = residual.add_(self.shared(rows))
        return self.parallel.sum(self.experts(rows, logits, residual))


class SharedExpert:
    """The expert that all tokens have: mlp(x), if *gated* times sigmoid(x @ g)."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, *, gated: bool) -> None:
        self.mlp = GatedMLP(parameters.under("shared_expert"), spec.activation, is_part=True)
        self.gate: Product | None = None
        if not gated:
            return
        # The one row many times: a product of one column, and a sigmoid of fewer numbers than are
        # computed at a time, may have other bits for another number of rows.
        weight = parameters["shared_expert_gate.weight"].expand(LANES, -1).contiguous()
        self.gate = parameters.ops.linear(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T', H] for x [T', H]."""
        if self.gate is None:
            return self.mlp(x)
        return torch.sigmoid(self.gate(x))[:, :1].mul(self.mlp(x))


# ----------------------------------------------------- what gives an expert's weights by its number


def _each(parameters: Parameters) -> Callable[[int], ExpertWeights]:
    def read(index: int) -> ExpertWeights:
        gate, up, down = (parameters.product(f"{index}.{name}.weight") for name in PROJECTIONS)
        return ExpertWeights(gate, up, down)

    return read


def _stacked(parameters: Parameters) -> Callable[[int], ExpertWeights]:
    whole = [parameters[f"{name}.weight"] for name in PROJECTIONS]
    return lambda index: ExpertWeights(*(tensor[index] for tensor in whole))


def _fused(parameters: Parameters) -> Callable[[int], ExpertWeights]:
    weights_of = _fused_weights(parameters)
    both_bias = parameters.optional("gate_up_proj_bias")
    down_bias = parameters.optional("down_proj_bias")

    def read(index: int) -> ExpertWeights:
        weights = weights_of(index)
        if both_bias is None or down_bias is None:
            return weights
        bias = both_bias[index]
        return replace(
            weights,
            gate_bias=bias[::2].contiguous(),
            up_bias=bias[1::2].contiguous(),
            down_bias=down_bias[index].contiguous(),
        )

    return read


def _fused_weights(parameters: Parameters) -> Callable[[int], ExpertWeights]:
    """Return what gives an expert's weights without its biases."""
    names = "gate_up_proj", "down_proj"
    codes = [matrix for name in names if (matrix := parameters.quantized(name)) is not None]
    if len(codes) < 2:
        both, down = (parameters[name] for name in names)
        return lambda i: ExpertWeights(both[i].t()[::2], both[i].t()[1::2], down[i].t())
    inner, outer = codes
    hidden, width = inner.shape[1], outer.shape[1]

    def read(index: int) -> ExpertWeights:
        rows = torch.arange(2 * width * index, 2 * width * (index + 1))
        gate, up = inner.rows(rows[::2]), inner.rows(rows[1::2])
        return ExpertWeights(gate, up, outer.rows(torch.arange(hidden) + hidden * index))

    return read


def _halves(parameters: Parameters) -> Callable[[int], ExpertWeights]:
    both, down = parameters["gate_up_proj"], parameters["down_proj"]

    def read(index: int) -> ExpertWeights:
        gate, up = both[index].t().chunk(2)
        return ExpertWeights(gate, up, down[index].t())

    return read


READERS = {"each": _each, "stacked": _stacked, "fused": _fused, "halves": _halves}
