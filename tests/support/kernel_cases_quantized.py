"""Cases of products with quantized weights, and their operands."""

from dataclasses import dataclass

import torch
from torch import Tensor
from zlm.kernels import quantized_codes
from zlm.kernels.quantized_codes import Codes

KINDS = ("w4", "w4z", "w4o", "int8", "int8z", "fp8")


@dataclass(frozen=True)
class QuantizedCase:
    """A product of *rows* rows with N columns; *kind*: of the codes, z with zeros, o offsets.

    group 0: a scale a row.
    """

    kind: str
    rows: int
    N: int
    K: int
    group: int = 0
    bias: bool = False
    residual: bool = False
    activation: str = ""

    def __str__(self) -> str:
        parts = [self.kind, f"{self.rows}x{self.N}x{self.K}", f"g{self.group}"]
        parts += [name for name in ("bias", "residual") if getattr(self, name)]
        return "-".join([*parts, *([self.activation] if self.activation else [])])


def random_codes(case: QuantizedCase, device: str, seed: int = 0) -> Codes:
    """Return a random weight of *case*: its values are about as large as a model's."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = case.N * (2 if case.activation else 1)
    group = case.group or case.K
    shape = rows, case.K // group

    def numbers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, device=device)

    scales = torch.rand(shape, generator=generator, device=device).add_(0.5) * case.K**-0.5
    beside: dict = {}
    if case.kind.endswith("z"):
        low, high = (0, 16) if case.kind.startswith("w4") else (-100, 100)
        beside["zeros"] = numbers(low, high, *shape).to(torch.int8)
    if case.kind.endswith("o"):
        beside["offsets"] = (torch.rand(shape, generator=generator, device=device) - 1).half()
    if case.kind.startswith("w4"):
        data = quantized_codes.pack(numbers(0, 16, rows, case.K).to(torch.uint8), 4)
        zero = 8 if case.kind == "w4" else 0
        return Codes(data, (scales / 4).half(), group, zero, **beside)
    if case.kind == "fp8":
        values = torch.randn(rows, case.K, generator=generator, device=device) * 100
        data = quantized_codes.pack(values.clamp(-448, 448).to(torch.float8_e4m3fn), 8)
        return Codes(data, scales / 100, group, **beside)
    data = quantized_codes.pack(numbers(-128, 128, rows, case.K).to(torch.int8), 8)
    return Codes(data, scales / 64, group, **beside)


def operands(case: QuantizedCase, dtype: torch.dtype, device: str, seed: int = 0) -> dict:
    """Return the arguments of ``quantized_linear.linear`` but out."""
    generator = torch.Generator(device).manual_seed(seed + 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows = case.N * (2 if case.activation else 1)
    return {
        "x": random(case.rows, case.K),
        "weight": random_codes(case, device, seed),
        "bias": random(rows) if case.bias else None,
        "residual": random(case.rows, case.N) if case.residual else None,
        "activation": case.activation,
    }


SMALL = [
    QuantizedCase("w4", 1, 20, 128, 32),
    QuantizedCase("w4", 1, 20, 64, bias=True, residual=True),
    QuantizedCase("w4z", 1, 24, 256, 128, residual=True),
    QuantizedCase("w4z", 2, 17, 192, 64, bias=True, activation="silu"),
    QuantizedCase("w4o", 1, 20, 576, 32, activation="gelu_tanh"),
    QuantizedCase("w4o", 1, 9, 96, bias=True, residual=True),
    QuantizedCase("int8", 1, 20, 96),
    QuantizedCase("int8", 1, 20, 128, 32, bias=True, residual=True),
    QuantizedCase("int8z", 1, 13, 96, 16, activation="silu"),
    QuantizedCase("int8o", 1, 13, 64, 16),
    QuantizedCase("fp8", 1, 20, 96, bias=True, residual=True),
    QuantizedCase("fp8", 1, 20, 256, 128, activation="silu"),
    QuantizedCase("fp8", 2, 11, 576, activation="gelu_tanh", bias=True),
]
