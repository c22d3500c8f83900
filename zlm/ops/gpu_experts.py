"""A mixture of experts on the GPU: routing, products over tiles of each expert's rows, their sum.

Five launches (``zlm.kernels.moe_plan``, ``zlm.kernels.moe``), whose grids depend on shapes alone.
Where all experts are quantized alike their codes are kept (``zlm.kernels.quantized_moe``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zlm.errors import ModelError
from zlm.kernels import moe, moe_plan, quantized_moe
from zlm.kernels.moe import Activation, ExpertTensors
from zlm.kernels.quantized_moe import ExpertCodes
from zlm.ops import gpu_packing
from zlm.ops.backend import ExpertWeights, Mixture
from zlm.ops.block_matrix import BlockMatrix, Weight, stack

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
        dtype: torch.dtype,
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
        first = read(0)
        again = read
        codes: ExpertCodes | None = None
        if isinstance(first.gate, BlockMatrix):
            experts = [first, *(read(index) for index in range(1, mixture.count))]
            codes = _codes(experts, device)
            again = experts.__getitem__
        self.weights: ExpertTensors | ExpertCodes
        self.weights = codes or _stack(first, again, mixture.count, device, dtype)
        self.width = self.weights.down.shape[-1]
        self.activation = Activation(mixture.activation, mixture.limit, mixture.alpha)
        self.fixed = fixed
        self.pdl = pdl

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        mixture, pdl = self.mixture, self.pdl
        tokens, top = x.shape[0], mixture.chosen
        pairs = tokens * top
        setting = self._setting(x.dtype, pairs)
        experts = torch.empty((tokens, top), dtype=torch.int32, device=x.device)
        shares = torch.empty((tokens, top), dtype=torch.float32, device=x.device)
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        size = moe_plan.num_tiles(pairs, mixture.count, setting[0]), moe_plan.TILE_INTS
        tiles = torch.empty(size, dtype=torch.int32, device=x.device)
        moe_plan.route(
            logits,
            normalize=mixture.normalize,
            experts=experts,
            shares=shares,
            sigmoid=mixture.sigmoid,
            pdl=pdl,
        )
        moe_plan.plan(experts, mixture.count, setting[0], order=order, tiles=tiles, pdl=pdl)
        results = self._products(x, shares, order, tiles, setting)
        moe.combine(results, residual, out=residual, pdl=pdl)
        return residual

    def _setting(self, dtype: torch.dtype, pairs: int) -> tuple[int, ...]:
        """Return how the products are launched; first of all BM."""
        count, fixed = self.mixture.count, self.fixed
        if isinstance(self.weights, ExpertCodes):
            return quantized_moe.tile_setting(pairs, count, fixed=fixed)
        return moe.tile_setting(dtype, pairs, count, fixed=fixed)

    def _products(
        self, x: Tensor, shares: Tensor, order: Tensor, tiles: Tensor, setting: tuple[int, ...]
    ) -> Tensor:
        """Return what the experts make of every pair of token and expert, [T k, H]."""
        weights, pairs = self.weights, order.shape[0]
        kernels: Any = quantized_moe if isinstance(weights, ExpertCodes) else moe
        activation, pdl = self.activation, self.pdl
        # By which of the products shares multiply.
        read, told = (shares, None) if self.mixture.sigmoid else (None, shares)
        gated = torch.empty((pairs, self.width), dtype=x.dtype, device=x.device)
        results = torch.empty((pairs, x.shape[1]), dtype=x.dtype, device=x.device)
        kernels.inner(
            x, weights, order, tiles, setting, activation, out=gated, shares=read, pdl=pdl
        )
        kernels.outer(gated, weights, told, order, tiles, setting, out=results, pdl=pdl)
        return results


def _codes(experts: Sequence[ExpertWeights], device: torch.device) -> ExpertCodes | None:
    """Return the codes of all experts; None if they are not all quantized, and alike."""
    downs: list[Weight] = [each.down for each in experts]
    inners: list[Weight] = [weight for each in experts for weight in (each.gate, each.up)]
    if not all(isinstance(weight, BlockMatrix) for weight in inners + downs):
        return None
    matrices = [stack(weights, torch.float32) for weights in (inners, downs)]
    packed = [
        gpu_packing.pack(matrix, device)
        for matrix in matrices
        if isinstance(matrix, BlockMatrix) and matrix.order is None
    ]
    if len(packed) < 2 or packed[0] is None or packed[1] is None:
        return None
    if experts[0].gate_bias is None:
        return ExpertCodes(packed[0], packed[1])
    return ExpertCodes(packed[0], packed[1], *_stacked_biases(experts))


def _stacked_biases(experts: Sequence[ExpertWeights]) -> tuple[Tensor, Tensor]:
    """Return the biases of gate and up, [E, 2 I], and of down, [E, H]."""
    both, downs = [], []
    for expert in experts:
        assert expert.gate_bias is not None and expert.up_bias is not None
        assert expert.down_bias is not None
        both.append(torch.cat((expert.gate_bias, expert.up_bias)))
        downs.append(expert.down_bias)
    return torch.stack(both), torch.stack(downs)


def _stack(
    one: ExpertWeights,
    read: Callable[[int], ExpertWeights],
    count: int,
    device: torch.device,
    dtype: torch.dtype,
) -> ExpertTensors:
    """Return the weights of all experts, *one* being the first, each copied to its place."""
    first = one.plain(dtype)
    width, hidden = first.gate.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty((count, *shape), dtype=dtype, device=device)

    gate_up, down = empty(2 * width, hidden), empty(hidden, width)
    gate_up_bias = None if first.gate_bias is None else empty(2 * width)
    down_bias = None if first.down_bias is None else empty(hidden)
    for index in range(count):
        expert = first if index == 0 else read(index).plain(dtype)
        gate_up[index, :width], gate_up[index, width:] = expert.gate, expert.up
        down[index] = expert.down
        if gate_up_bias is not None and down_bias is not None:
            assert expert.gate_bias is not None and expert.up_bias is not None
            assert expert.down_bias is not None
            gate_up_bias[index] = torch.cat((expert.gate_bias, expert.up_bias))
            down_bias[index] = expert.down_bias
    return ExpertTensors(gate_up, down, gate_up_bias, down_bias)
