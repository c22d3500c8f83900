"""A mixture of experts on the GPU: routing, products over tiles of each expert's rows, their sum.

Five launches (``zlm.kernels.moe_plan``, ``zlm.kernels.moe``), whose grids depend on shapes alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zlm.errors import ModelError
from zlm.kernels import moe, moe_plan
from zlm.kernels.moe import Activation, ExpertTensors
from zlm.ops.backend import ExpertWeights, Mixture

MATRIX_UNITS = (8, 0)  # compute capability from which Triton has ``tl.dot``


class GpuExperts:
    """See ``zlm.ops.backend.Experts``. Owns the weights of all experts, in two tensors.

    fixed: a token's result has the same bits in any company.
    """

    def __init__(
        self,
        mixture: Mixture,
        read: Callable[[int], ExpertWeights],
        device: torch.device,
        *,
        fixed: bool,
        pdl: bool,
    ) -> None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < MATRIX_UNITS:
            raise ModelError(
                "the model is a mixture of experts, which needs a GPU of compute capability 8.0 or "
                "newer; --device cpu computes it anywhere"
            )
        self.mixture = mixture
        self.weights = _stack(read, mixture.count, device)
        self.activation = Activation(mixture.activation, mixture.limit, mixture.alpha)
        self.fixed = fixed
        self.pdl = pdl

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        mixture, weights, pdl = self.mixture, self.weights, self.pdl
        tokens, top = x.shape[0], mixture.chosen
        pairs, (hidden, width) = tokens * top, weights.down.shape[1:]
        setting = moe.tile_setting(x.dtype, pairs, mixture.count, fixed=self.fixed)
        experts = torch.empty((tokens, top), dtype=torch.int32, device=x.device)
        shares = torch.empty((tokens, top), dtype=torch.float32, device=x.device)
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        size = moe_plan.num_tiles(pairs, mixture.count, setting[0]), moe_plan.TILE_INTS
        tiles = torch.empty(size, dtype=torch.int32, device=x.device)
        moe_plan.route(logits, normalize=mixture.normalize, experts=experts, shares=shares, pdl=pdl)
        moe_plan.plan(experts, mixture.count, setting[0], order=order, tiles=tiles, pdl=pdl)
        gated = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
        moe.inner(x, weights, order, tiles, setting, self.activation, out=gated, pdl=pdl)
        results = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
        moe.outer(gated, weights, shares, order, tiles, setting, out=results, pdl=pdl)
        moe.combine(results, residual, out=residual, pdl=pdl)
        return residual


def _stack(read: Callable[[int], ExpertWeights], count: int, device: torch.device) -> ExpertTensors:
    """Return the weights of all experts, each read once and copied to its place."""
    first = read(0)
    (width, hidden), dtype = first.gate.shape, first.gate.dtype

    def empty(*shape: int) -> Tensor:
        return torch.empty((count, *shape), dtype=dtype, device=device)

    gate_up, down = empty(2 * width, hidden), empty(hidden, width)
    gate_up_bias = None if first.gate_bias is None else empty(2 * width)
    down_bias = None if first.down_bias is None else empty(hidden)
    for index in range(count):
        expert = first if index == 0 else read(index)
        gate_up[index, :width], gate_up[index, width:] = expert.gate, expert.up
        down[index] = expert.down
        if gate_up_bias is not None and down_bias is not None:
            assert expert.gate_bias is not None and expert.up_bias is not None
            assert expert.down_bias is not None
            gate_up_bias[index] = torch.cat((expert.gate_bias, expert.up_bias))
            down_bias[index] = expert.down_bias
    return ExpertTensors(gate_up, down, gate_up_bias, down_bias)
