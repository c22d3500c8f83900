"""What the small-M products share: activations, epilogue, and what a product is asked to do.

Device functions and one record; the kernels are linear_gemv (M of a few), linear_slices and
linear_tile (up to 64, of small and of large weights), the choice between them is linear_small's.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

SMALL_BYTES = 16 * 2**20  # of weights that are read again from L2 rather than waited for
ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2}


@dataclass(frozen=True, slots=True)
class Product:
    """out = epilogue(prologue(x) @ weight.T + bias); checked by ``linear_small.linear``.

    x [M, K], out [M, N], residual [M, N] with rows of any stride; weight and up [N, K]; biases [N];
    norm [K]. None: not asked for.
    """

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None
    norm: Tensor | None
    eps: float
    residual: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    activation: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The pointers, in the order of the kernels' first parameters."""
        return (
            self.x, self.weight, self.bias, self.norm, self.residual, self.up, self.up_bias,
            self.out,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, gate and up together."""
        return self.weight.nbytes * (1 if self.up is None else 2)

    @property
    def strides(self) -> tuple[int, ...]:
        """Row strides of x, weight, residual, up, out."""
        residual = 0 if self.residual is None else self.residual.stride(0)
        up = 0 if self.up is None else self.up.stride(0)
        return self.x.stride(0), self.weight.stride(0), residual, up, self.out.stride(0)

    @property
    def flags(self) -> dict[str, bool | int]:
        """The constexprs that say which parts of prologue and epilogue there are."""
        return {
            "BIAS": self.bias is not None,
            "NORM": self.norm is not None,
            "RESIDUAL": self.residual is not None,
            "GATE": self.activation,
            "UP_BIAS": self.up_bias is not None,
        }


@triton.jit
def activate(x, KIND: tl.constexpr):
    """silu (1) or gelu_tanh (2) of float32 x; 0.5 (1 + tanh y) is sigmoid(2 y)."""
    if KIND == 1:
        y = x
    else:
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-y))


@triton.jit
def finish(
    acc, acc_up, b_bias, b_up_bias, b_residual,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, UP_BIAS: tl.constexpr,
):  # fmt: skip
    """Return the epilogue of float32 *acc*; biases fit its last dimension, the residual all of it.

    What its flag says is absent is not looked at. All of it was loaded earlier: a load here would
    stand between the last sum and the store.
    """
    if BIAS:
        acc += b_bias.to(tl.float32)
    if GATE:
        if UP_BIAS:
            acc_up += b_up_bias.to(tl.float32)
        acc = activate(acc, GATE) * acc_up
    if RESIDUAL:
        acc += b_residual.to(tl.float32)
    return acc
