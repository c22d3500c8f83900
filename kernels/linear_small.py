"""y = x @ W.T + b for the few rows of a decode step, with what stands before and after it fused in.

    norm       x is RMS-normalised first:  x / sqrt(mean(x²) + eps) * norm
    residual   out = residual + y          (out may be the residual itself)
    up         out = act(x @ W.T + b) * (x @ up.T + up_bias), act silu or gelu_tanh

Gate and up are two weights [N, K]. They may be the two halves of one merged tensor [2 N, K], which
is then still one weight for a library product with many rows.

Whatever the types of x, norm, residual and out: x (after the norm) is rounded to the weight's type,
sums are float32, and only the result is rounded. So a float32 residual beside float16 weights never
leaves float32. Up to ``MOST_ROWS`` rows; more is a library's work, unless a row is to have the same
bits in any company (*fixed*): then one tile serves for any number of rows.

The table holds what a sweep found on a card (cold weights, inside a CUDA graph): for a vector
product the columns of a program and its warps, by rows of weight (gate and up together) and K.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from zlm.kernels import linear_gemv, linear_slices, linear_tile
from zlm.kernels.launch import cdiv, power_of_two
from zlm.kernels.linear_epilogue import ACTIVATIONS, SMALL_BYTES, Product

MOST_ROWS = 64
VECTOR_ROWS = 4  # up to here by vector arithmetic: a weight costs M products, and 8 fill the SMs
MOST_TILE_ELEMENTS = 128  # of a weight's tile, a thread

# (rows of weight, K): (BN, warps). H200, 2026-11-29, M = 1, in a chain of overlapping launches.
VECTOR: dict[str, dict[tuple[int, int], tuple[int, int]]] = {
    "NVIDIA H200": {
        (960, 576): (4, 1),
        (576, 576): (8, 4),
        (3072, 576): (4, 1),
        (576, 1536): (4, 4),
        (49152, 576): (8, 4),
        (1536, 640): (4, 4),
        (640, 1024): (8, 8),
        (4096, 640): (8, 4),
        (640, 2048): (8, 8),
        (4096, 1024): (4, 2),
        (1024, 2048): (8, 8),
        (6144, 1024): (4, 1),
        (1024, 3072): (8, 8),
        (6144, 4096): (4, 4),
        (4096, 4096): (2, 8),
        (28672, 4096): (4, 8),
        (4096, 14336): (1, 8),
    }
}
# Rows of x at most: (BM, BN, BK, stages, warps). The same card; 16 is its M = 8, 64 its M = 64.
TILES: dict[str, tuple[tuple[int, tuple[int, int, int, int, int]], ...]] = {
    "NVIDIA H200": (
        (16, (16, 32, 128, 5, 4)),
        (32, (32, 32, 128, 5, 4)),
        (64, (64, 32, 128, 5, 4)),
    )
}
# Of large weights, by their rows (gate and up together) and K; more than BM rows have it as above.
LARGE_TILES: dict[str, dict[tuple[int, int], tuple[int, int, int, int, int]]] = {
    "NVIDIA H200": {
        (6144, 4096): (16, 64, 128, 5, 4),
        (4096, 4096): (16, 64, 128, 5, 4),
        (28672, 4096): (16, 64, 128, 5, 4),
        (4096, 14336): (8, 32, 256, 5, 2),
    }
}
FIXED_TILE = (64, 64, 64, 4, 4)  # for any number of rows
ANY_TILES = (
    (16, (16, 32, 128, 3, 4)),
    (32, (32, 32, 64, 3, 4)),
    (64, (64, 64, 64, 3, 4)),
)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """Return the product in float64, [M, N]: rounded only where the kernels do so on purpose."""
    wide = x.double()
    if norm is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.double()
    wide = wide.to(weight.dtype).double()
    out = F.linear(wide, weight.double(), None if bias is None else bias.double())
    if up is not None:
        gated = F.silu(out) if activation == "silu" else F.gelu(out, approximate="tanh")
        out = gated * F.linear(wide, up.double(), None if up_bias is None else up_bias.double())
    return out if residual is None else residual.double() + out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str = "",
    fixed: bool = False,
    tiled: bool = False,
    pdl: bool = False,
) -> None:
    """Write the product of x [M, K] and *weight* [N, K] to *out* [M, N]; M is 1 to MOST_ROWS.

    With *fixed* M is any number, and a row of *out* does not depend on it, nor on other rows.
    *tiled*: by tiles of the matrix units, whatever the sizes.

    *weight* and *up* bfloat16, float16 or float32, the same; everything else any of these. Last
    dimensions are contiguous, rows may be strided. *bias*, *up_bias* [N], *norm* [K], *residual*
    [M, N]. *pdl*: the launch may begin while the kernel before it ends, which must be one that
    takes part too.
    """
    (rows, K), N = x.shape, weight.shape[0]
    assert rows >= 1 and (fixed or rows <= MOST_ROWS)
    assert weight.shape[1] == K and out.shape == (rows, N)
    assert all(t.stride(-1) == 1 for t in (x, weight, out, up, residual) if t is not None)
    assert (up is None) == (activation == ""), "an activation stands between gate and up"
    assert up is None or (up.shape == weight.shape and up.dtype == weight.dtype)
    assert residual is None or residual.shape == out.shape
    product = Product(
        x, weight, out, bias, norm, eps, residual, up, up_bias, ACTIVATIONS[activation]
    )
    device = device_name(x.device)
    if fixed:
        linear_tile.run(product, *FIXED_TILE, pdl=pdl)
    elif not tiled and rows <= VECTOR_ROWS:
        columns, chunk, warps = vector_setting(device, N, K, gated=up is not None)
        linear_gemv.run(product, columns, chunk, warps, pdl=pdl)
    elif not tiled and product.weight_bytes <= SMALL_BYTES and linear_slices.takes(product):
        linear_slices.run(product, pdl=pdl)
    else:
        weights = 1 if up is None else 2
        linear_tile.run(product, *tile_setting(device, rows, N, K, weights), pdl=pdl)


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the card's name, as the tables have it; "" for the CPU (Triton's interpreter)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@functools.cache
def vector_setting(device: str, N: int, K: int, *, gated: bool) -> tuple[int, int, int]:
    """Return BN, the chunk of K and the warps of a vector product with N output columns."""
    weights = 2 if gated else 1
    size = power_of_two(K)
    tuned = VECTOR.get(device, {}).get((N * weights, K))
    if tuned is None:
        warps = 8 if size >= 2048 else 4
        columns = min(8, max(1, (8192 if size >= 2048 or N >= 16384 else 4096) // size))
        while columns > 1 and cdiv(N * weights, columns) < 128:
            columns //= 2  # fewer programs than SMs
    else:
        columns, warps = tuned
    columns = max(1, columns // weights)
    room = MOST_TILE_ELEMENTS * 32 * warps // (columns * weights)
    while columns > 1 and room < size:
        columns, room = columns // 2, room * 2
    if room < size and warps < 8:
        warps, room = 8, MOST_TILE_ELEMENTS * 32 * 8 // weights
    return columns, size if room >= size else min(room, 8192), warps


def tile_setting(
    device: str, rows: int, N: int, K: int = 0, weights: int = 1
) -> tuple[int, int, int, int, int]:
    """Return BM, BN, BK, stages and warps of a product of *rows* rows with the matrix units."""
    large = LARGE_TILES.get(device, {}).get((weights * N, K))
    for most, setting in TILES.get(device, ANY_TILES):
        if rows <= most:
            if large is not None:
                return large[0] if rows <= large[0] else setting[0], *large[1:]
            BM, BN, BK, stages, warps = setting
            return BM, 16 if N <= 2048 else BN, BK, stages, warps
    raise ValueError(f"linear takes at most {MOST_ROWS} rows, not {rows}")
