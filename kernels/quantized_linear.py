"""y = x @ W.T + b with quantized weights, read as they are; epilogues as ``linear_small`` has them.

    residual     out = residual + y          (out may be the residual itself)
    activation   out = act(x @ G.T + g) * (x @ U.T + u), W being [2 N, K]: G, then U

x is of any type and is used in that, sums are float32, and only the result is rounded. One row goes
by vector arithmetic, more by tiles of the matrix units, up to ``MOST_ROWS``; with *fixed* any
number of rows by tiles, and a row has the same bits in any company; with *by_rows* each row by
vector arithmetic, with *tiles* one row, too, by tiles.
"""

import torch.nn.functional as F
from torch import Tensor
from zlm.kernels import quantized_codes, quantized_tile, quantized_vector
from zlm.kernels.quantized_codes import Codes
from zlm.kernels.quantized_product import asked

MOST_ROWS = quantized_tile.MOST_ROWS


def reference(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """Return the product in float64, [M, N]."""
    wide = quantized_codes.spread(weight)
    out = F.linear(x.double(), wide, None if bias is None else bias.double())
    if activation:
        gate, up = out.chunk(2, 1)
        out = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    return out if residual is None else residual.double() + out


def linear(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    activation: str = "",
    scratch: Tensor | None = None,
    fixed: bool = False,
    by_rows: bool = False,
    tiles: bool = False,
    pdl: bool = False,
) -> None:
    """Write the product of x [M, K] and *weight* [N, K] to *out* [M, N]; see the module.

    scratch: float32, at least ``scratch_values`` of them, not needed if that is 0.
    """
    product = asked(x, weight, out, bias, residual, activation)
    if not x.shape[0]:
        return
    if _is_vector(x.shape[0], weight, by_rows=by_rows, tiles=fixed or tiles):
        quantized_vector.run(product, pdl=pdl)
    else:
        quantized_tile.run(product, scratch, fixed=fixed, pdl=pdl)


def scratch_values(
    rows: int,
    weight: Codes,
    *,
    activation: str,
    fixed: bool = False,
    by_rows: bool = False,
    tiles: bool = False,
) -> int:
    """Return how many float32 numbers a product of *rows* rows needs for partial sums."""
    if _is_vector(rows, weight, by_rows=by_rows, tiles=fixed or tiles):
        return 0
    return quantized_tile.scratch_values(rows, weight, gated=bool(activation), fixed=fixed)


def takes_rows(weight: Codes) -> bool:
    """Tell whether *weight* can be multiplied by rows."""
    return quantized_vector.takes(weight)


def _is_vector(rows: int, weight: Codes, *, by_rows: bool, tiles: bool) -> bool:
    return by_rows or (rows == 1 and not tiles and quantized_vector.takes(weight))
