"""The gated MLP of the Llama family: down(act(gate(x)) * up(x))."""

from torch import Tensor

from zlm.layers.parameters import Parameters
from zlm.ops.backend import Norm


class GatedMLP:
    """Parameters ``gate_proj``, ``up_proj`` [I, H] and ``down_proj`` [H, I]; biases if there."""

    def __init__(self, parameters: Parameters, activation: str, *, wide: bool = False) -> None:
        """*wide*: the result is float32."""
        self.gated = parameters.ops.gated(
            parameters["gate_proj.weight"],
            parameters["up_proj.weight"],
            parameters.optional("gate_proj.bias"),
            parameters.optional("up_proj.bias"),
            activation,
        )
        self.down = parameters.ops.linear(
            parameters["down_proj.weight"], parameters.optional("down_proj.bias"), wide=wide
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T', H] for x [T', H]."""
        return self.down(self.gated(x))

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Return *residual*, which is used up, plus the MLP of the norm of x."""
        return self.down.add(self.gated(x, norm), residual)
