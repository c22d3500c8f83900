"""The gated MLP of the Llama family: down(act(gate(x)) * up(x))."""

from torch import Tensor

from zlm.layers.parameters import Parameters
from zlm.ops import linear


class GatedMLP:
    """Parameters ``gate_proj``, ``up_proj`` [I, H] and ``down_proj`` [H, I]; biases if there."""

    def __init__(self, parameters: Parameters, activation: str) -> None:
        self.gate, self.up, self.down = (
            linear.pack(parameters[f"{name}.weight"], parameters.optional(f"{name}.bias"))
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H] for x [T, H]."""
        return self.down(self.gate.gate(x, self.up, self.activation))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return *residual* plus the MLP of x."""
        return self.down.add(self.gate.gate(x, self.up, self.activation), residual)
