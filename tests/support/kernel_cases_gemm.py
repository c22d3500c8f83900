"""Cases of the small-M products: one table for the interpreter's suite, the GPU's and the bench."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GemmCase:
    """A product of *rows* rows with a weight [N, K] and what is fused around it."""

    rows: int
    N: int
    K: int
    bias: bool = False
    norm: bool = False
    residual: bool = False
    activation: str = ""

    def __str__(self) -> str:
        parts = [name for name in ("bias", "norm", "residual") if getattr(self, name)]
        parts += [self.activation] if self.activation else []
        return "-".join([f"m{self.rows}", f"{self.N}x{self.K}", *parts])


SMALL = [
    GemmCase(1, 13, 72),
    GemmCase(1, 5, 9000, norm=True),
    GemmCase(2, 5, 17000, bias=True, norm=True, activation="silu"),
    GemmCase(3, 13, 72, bias=True, norm=True),
    GemmCase(4, 20, 40, bias=True, activation="silu"),
    GemmCase(2, 20, 40, norm=True, residual=True),
    GemmCase(5, 20, 40, bias=True, norm=True, residual=True, activation="gelu_tanh"),
    GemmCase(16, 33, 48, activation="silu"),
    GemmCase(17, 20, 80, residual=True),
    GemmCase(64, 18, 100, bias=True, norm=True),
]

_LAYERS = [
    (960, 576), (576, 576), (576, 1536), (1536, 640), (640, 1024), (640, 2048), (4096, 1024),
    (1024, 2048), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 14336), (100, 28672),
]  # fmt: skip
_GATES = [(1536, 576), (2048, 640), (3072, 1024), (14336, 4096)]
_ROWS = (1, 2, 3, 4, 5, 8, 16, 24, 33, 64)

REAL = [
    *(GemmCase(rows, N, K) for N, K in _LAYERS for rows in (1, 4, 8, 64)),
    *(GemmCase(rows, 49152, 576, norm=True) for rows in (1, 4, 16)),
    *(GemmCase(rows, 960, 576, bias=True, norm=True) for rows in _ROWS),
    *(GemmCase(rows, 576, 1536, residual=True) for rows in _ROWS),
    *(GemmCase(rows, 77, 4100, bias=True, norm=True, residual=True) for rows in _ROWS),
    *(GemmCase(rows, N, K, norm=True, activation="silu") for N, K in _GATES for rows in (1, 8)),
    *(GemmCase(rows, 2048, 640, norm=True, activation="gelu_tanh") for rows in _ROWS),
    GemmCase(2, 64, 20000, bias=True, norm=True, activation="silu"),
]


def operands(
    case: GemmCase,
    dtype: torch.dtype,
    device: str,
    *,
    residual_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, Tensor | str | float | None]:
    """Return the arguments of ``linear_small.linear``, less ``out``.

    Rows of x, and of the residual, are strided; gate and up are halves of one merged weight. With
    *residual_dtype* x and the residual have that type.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, kind: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device) * scale
        return values.to(kind)

    wide = residual_dtype or dtype
    gated = bool(case.activation)
    weight = random(case.N * (1 + gated), case.K, scale=case.K**-0.5)
    bias = random(case.N * (1 + gated)) if case.bias else None
    return {
        "x": random(case.rows, case.K + 16, kind=wide)[:, : case.K],
        "weight": weight[: case.N],
        "bias": None if bias is None else bias[: case.N],
        "norm": random(case.K, kind=torch.float32) if case.norm else None,
        "eps": 1e-5,
        "residual": random(case.rows, case.N + 8, kind=wide)[:, : case.N]
        if case.residual
        else None,
        "up": weight[case.N :] if gated else None,
        "up_bias": None if bias is None or not gated else bias[case.N :],
        "activation": case.activation,
    }


# (rows, width) of gate and up after a merged product.
GATED = [(1, 100), (5, 1030), (5, 2048), (64, 1536), (257, 14336)]


def gated_operand(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return rows [gate, up] of a strided tensor, [rows, 2 * width]."""
    generator = torch.Generator(device).manual_seed(0)
    wide = torch.randn(rows, 2 * width + 8, generator=generator, device=device) * 3
    return wide.to(dtype)[:, : 2 * width]


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return ‖got - wanted‖ / ‖wanted‖ in float64; NaN if there is one."""
    return float((got.double() - wanted).norm() / wanted.norm())
