"""What a product with quantized weights is asked to do; the kernels share it.

plain     x @ W.T + bias                     [M, N]
gated     act(x @ G.T + g) * (x @ U.T + u)   [M, N], the weight being [2 N, K]: G, then U
residual  residual + either
"""

from dataclasses import dataclass

from torch import Tensor
from zlm.kernels.linear_epilogue import ACTIVATIONS
from zlm.kernels.quantized_codes import Codes


@dataclass(frozen=True, slots=True)
class QuantizedProduct:
    """x [M, K], out and residual [M, N] with rows of any stride; bias [N], or [2 N] of a gate."""

    x: Tensor
    weight: Codes
    out: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: int

    @property
    def residual_stride(self) -> int:
        return 0 if self.residual is None else self.residual.stride(0)

    @property
    def flags(self) -> dict[str, bool | int]:
        """The constexprs that say which parts of the epilogue there are."""
        return {
            "BIAS": self.bias is not None,
            "RESIDUAL": self.residual is not None,
            "GATE": self.activation,
        }


def asked(
    x: Tensor,
    weight: Codes,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> QuantizedProduct:
    """Return the product, its shapes checked."""
    rows, columns = weight.shape
    width = rows // 2 if activation else rows
    assert x.shape[1] == columns and out.shape == (x.shape[0], width)
    assert residual is None or residual.shape == out.shape
    assert all(t.stride(-1) == 1 for t in (x, out, residual, weight.data) if t is not None)
    assert columns % weight.group == 0 and weight.scales.shape == (rows, columns // weight.group)
    assert bias is None or bias.shape == (rows,)
    return QuantizedProduct(x, weight, out, bias, residual, ACTIVATIONS[activation])
