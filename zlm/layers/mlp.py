"""The gated MLP of the Llama family: down(act(gate(x)) * up(x))."""

import torch
from torch import Tensor

from zlm.layers.parameters import Parameters
from zlm.ops.backend import Norm
from zlm.ops.block_matrix import Weight, take_rows


class GatedMLP:
    """Parameters ``gate_proj``, ``up_proj`` [I, H] and ``down_proj`` [H, I]; biases if there.

    In the place of the first two there may be ``gate_up_proj`` [2 I, H], without biases.
    """

    def __init__(
        self,
        parameters: Parameters,
        activation: str,
        *,
        wide: bool = False,
        is_part: bool = False,
    ) -> None:
        """*wide*: the result is float32. is_part: it is this rank's part of a sum."""
        gate, up = _gate_and_up(parameters)
        self.gated = parameters.ops.gated(
            gate,
            up,
            parameters.optional("gate_proj.bias"),
            parameters.optional("up_proj.bias"),
            activation,
        )
        down = parameters.ops.linear(
            parameters.product("down_proj.weight"), parameters.optional("down_proj.bias"), wide=wide
        )
        parameters.ops.join(self.gated, down)
        self.down = down if is_part else parameters.parallel.summed(down)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T', H] for x [T', H]."""
        return self.down(self.gated(x))

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Return *residual*, which is used up, plus the MLP of the norm of x."""
        return self.down.add(self.gated(x, norm), residual)


def _gate_and_up(parameters: Parameters) -> tuple[Weight, Weight]:
    if f"{parameters.prefix}gate_up_proj.weight" not in parameters.names:
        return parameters.product("gate_proj.weight"), parameters.product("up_proj.weight")
    both = parameters.product("gate_up_proj.weight")
    gate, up = (take_rows(both, rows) for rows in torch.arange(both.shape[0]).chunk(2))
    return gate, up
