"""Rows of bench/gpu_kernels.py for the products of a decode step: ours beside the library's.

Every launch of a case has another copy of its weight, and the copies together exceed the L2 cache
several times, so that it finds its weight cold, as in a step. Products, with M rows and weights
[N, K] in bfloat16:

    plain   x @ W.T                       library  the product alone through torch (cuBLAS)
    norm    rms_norm(x) @ W.T             add      residual + x @ W.T
    gate    silu(rms_norm(x) @ G.T) * (rms_norm(x) @ U.T), N rows in G and in U
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from zlm.kernels import linear_small

COLD_BYTES = 256 * 2**20
MOST_COPIES = 256
ROWS = (1, 8, 64)
# model, product, N (of gate alone), K
SHAPES = [
    ("135m", "norm", 960, 576),
    ("135m", "add", 576, 576),
    ("135m", "gate", 1536, 576),
    ("135m", "add", 576, 1536),
    ("135m", "norm", 49152, 576),
    ("270m", "norm", 1536, 640),
    ("270m", "plain", 640, 1024),
    ("270m", "gate", 2048, 640),
    ("270m", "plain", 640, 2048),
    ("270m", "norm", 262144, 640),
    ("0.6b", "norm", 4096, 1024),
    ("0.6b", "add", 1024, 2048),
    ("0.6b", "gate", 3072, 1024),
    ("0.6b", "add", 1024, 3072),
    ("0.6b", "norm", 151936, 1024),
    ("8b", "norm", 6144, 4096),
    ("8b", "add", 4096, 4096),
    ("8b", "gate", 14336, 4096),
    ("8b", "add", 4096, 14336),
    ("8b", "norm", 128256, 4096),
]


Launch = Callable[[], None]
Work = tuple[list[Launch], int, int]  # launches; bytes and operations of one


@lru_cache(maxsize=1)  # the cases of a shape come one after another
def _copies(total: int, K: int, device: str) -> list[Tensor]:
    count = min(MOST_COPIES, max(2, -(-COLD_BYTES // (total * K * 2))))
    weights = torch.randn(count, total, K, device=device, dtype=torch.bfloat16)
    return list(weights.mul_(K**-0.5))


def work(kind: str, N: int, K: int, rows: int, *, library: bool, device: str = "cuda") -> Work:
    """Return the launches of a product, and the bytes and operations of one."""
    total = N * (2 if kind == "gate" else 1)
    copies = _copies(total, K, device)
    x = torch.randn(rows, K, device=device, dtype=torch.bfloat16)
    moved, operations = 2 * (total * K + rows * (K + N)), 2 * rows * total * K
    launches: list[Launch]
    if library:
        out = x.new_empty(rows, total)
        launches = [partial(torch.mm, x, weight.t(), out=out) for weight in copies]
        return launches, moved, operations
    out = x.new_empty(rows, N)
    fused: dict = {"out": out}
    if kind in ("norm", "gate"):
        fused |= {"norm": torch.randn(K, device=device), "eps": 1e-5}
    if kind == "add":
        fused["residual"] = torch.randn_like(out)
    if kind == "gate":
        gate = {"activation": "silu", **fused}
        launches = [partial(linear_small.linear, x, w[:N], up=w[N:], **gate) for w in copies]
    else:
        launches = [partial(linear_small.linear, x, weight, **fused) for weight in copies]
    return launches, moved, operations


def _name(model: str, kind: str, N: int, K: int, rows: int, library: bool) -> str:
    return f"{model} {kind} {N}x{K} m{rows}{' library' if library else ''}"


CASES: dict[str, Callable[[], Work]] = {
    _name(model, kind, N, K, rows, library): partial(work, kind, N, K, rows, library=library)
    for model, kind, N, K in SHAPES
    for rows in ROWS
    for library in (False, True)
}
