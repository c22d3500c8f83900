"""Settings of the products of few rows, each timed in a chain of overlapping launches.

    python bench/kernel_sweep.py [--shapes smollm2-135m,...] [--rows 1,8,64] [--seconds 60]

A graph holds launches of one product over different weights, so many that they find them cold; what
is printed is the median time of a launch, in µs, best settings first: BN/warps of the vector
product (1 row), BN/BK/stages/warps of the tiles, 0 for the slices. With them the same product by
cuBLAS, alone. The last line is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
from gpu_kernels import Launch, seconds_a_launch
from torch import Tensor
from zlm.kernels import linear_gemv, linear_slices, linear_tile
from zlm.kernels.linear_epilogue import ACTIVATIONS, Product

from zlm.worker.kernel_farm import Farm
from zlm.worker.kernel_variants import Recorder, current_target

COLD_BYTES, MOST_COPIES = 160 * 2**20, 120
BEST = 5  # settings printed
# Rows of weight (of gate alone), K, and what is fused, for the four products of a layer.
SHAPES: dict[str, list[tuple[str, int, int, str]]] = {
    "smollm2-135m": [
        ("qkv", 960, 576, "norm"),
        ("out", 576, 576, "add"),
        ("gated", 1536, 576, "gate"),
        ("down", 576, 1536, "add"),
    ],
    "gemma-3-270m": [
        ("qkv", 1536, 640, ""),
        ("out", 640, 1024, ""),
        ("gated", 2048, 640, "plain gate"),
        ("down", 640, 2048, ""),
    ],
    "qwen3-0.6b": [
        ("qkv", 4096, 1024, "norm"),
        ("out", 1024, 2048, "add"),
        ("gated", 3072, 1024, "gate"),
        ("down", 1024, 3072, "add"),
    ],
    "llama-3.1-8b": [
        ("qkv", 6144, 4096, "norm"),
        ("out", 4096, 4096, "add"),
        ("gated", 14336, 4096, "gate"),
        ("down", 4096, 14336, "add"),
    ],
}
TILES = (  # BN, BK, stages, warps
    (16, 128, 5, 4),
    (16, 256, 3, 4),
    (32, 64, 8, 4),
    (32, 128, 5, 4),
    (32, 256, 3, 4),
    (64, 64, 6, 4),
    (64, 64, 10, 4),
    (64, 128, 3, 4),
    (64, 128, 5, 4),
    (128, 64, 4, 8),
    (128, 128, 4, 8),
)
SLICES = (0,)  # the setting that stands for linear_slices, which has none


@dataclass(frozen=True, slots=True)
class Operands:
    """A product of M rows over several weights."""

    x: Tensor
    weights: list[Tensor]
    norm: Tensor | None
    out: Tensor
    fused: str

    def product(self, weight: Tensor) -> Product:
        """Return the product with *weight*."""
        N = self.out.shape[1]
        gate = "gate" in self.fused
        return Product(
            x=self.x,
            weight=weight[:N],
            out=self.out,
            bias=None,
            norm=self.norm,
            eps=1e-5,
            residual=self.out if self.fused == "add" else None,
            up=weight[N:] if gate else None,
            up_bias=None,
            activation=ACTIVATIONS["silu" if gate else ""],
        )


def operands(N: int, K: int, fused: str, rows: int, device: str = "cuda") -> Operands:
    """Return random operands, with as many weights as keep the cache cold."""
    total = N * (2 if "gate" in fused else 1)
    count = max(8, min(MOST_COPIES, COLD_BYTES // (total * K * 2)))
    weights = torch.randn(count, total, K, device=device, dtype=torch.bfloat16)
    normed = rows == 1 and fused in ("norm", "gate")  # tiles have a norm before them
    norm = torch.ones(K, device=device) if normed else None
    x = torch.randn(rows, K, device=device, dtype=torch.bfloat16)
    out = torch.zeros(rows, N, device=device, dtype=torch.bfloat16)
    return Operands(x, list(weights.mul_(K**-0.5)), norm, out, fused)


def vector_settings(K: int, gate: bool) -> Iterator[tuple[int, ...]]:
    """Yield (BN, warps) whose tile takes between 8 and 128 elements of a thread."""
    size = triton.next_power_of_2(K) * (2 if gate else 1)
    for columns in (1, 2, 4, 8):
        for warps in (1, 2, 4, 8):
            if 16 <= columns * size // (32 * warps) <= 128:
                yield columns, warps


def tile_settings(rows: int, K: int, gate: bool) -> Iterator[tuple[int, ...]]:
    """Yield (BM, BN, BK, stages, warps)."""
    most = 16 if rows <= 16 else 32 if rows <= 32 else 64
    for columns, depth, stages, warps in TILES:
        if most * depth <= 64 * 128 and columns * depth * (2 if gate else 1) <= 2**15:
            yield most, columns, depth, stages, warps


def launches(made: Operands, setting: tuple[int, ...] | None) -> list[Launch]:
    """Return one launch for each weight; None: by cuBLAS."""
    if setting is None:
        total = made.x.new_empty(made.x.shape[0], made.weights[0].shape[0])
        return [partial(torch.mm, made.x, w.t(), out=total) for w in made.weights]
    products = [made.product(weight) for weight in made.weights]
    if setting == SLICES:
        return [partial(linear_slices.run, product, pdl=True) for product in products]
    if len(setting) == 2:
        size = triton.next_power_of_2(made.x.shape[1])
        run = partial(linear_gemv.run, columns=setting[0], chunk=size, warps=setting[1], pdl=True)
        return [partial(run, product) for product in products]
    names = ("rows", "columns", "depth", "stages", "warps")
    run = partial(linear_tile.run, **dict(zip(names, setting, strict=True)), pdl=True)
    return [partial(run, product) for product in products]


def settings(rows: int, K: int, fused: str) -> list[tuple[int, ...]]:
    """Return what is tried at *rows* rows."""
    gate = "gate" in fused
    if rows <= 1:
        return list(vector_settings(K, gate))
    slices = [SLICES] if (linear_slices.MOST_K // 2 if gate else linear_slices.MOST_K) >= K else []
    return [*slices, *tile_settings(rows, K, gate)]


def compile_ahead(shapes: list[str], rows_list: list[int]) -> None:
    """Compile every setting of every product, many at a time."""
    with Farm() as farm, Recorder() as recorder:
        for shape in shapes:
            for _, N, K, fused in SHAPES[shape]:
                for rows in rows_list:
                    made = operands(N, K, fused, rows)
                    for setting in settings(rows, K, fused):
                        launches(made, setting)[0]()
        for variant, error in farm.compile(recorder.variants, current_target()).items():
            print(f"{variant.name} was not compiled ahead: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=60.0, help="start no product after this")
    options = parser.parse_args()
    began, results = time.monotonic(), []
    torch.set_grad_enabled(False)
    shapes = options.shapes.split(",")
    rows_list = [int(rows) for rows in options.rows.split(",")]
    compile_ahead(shapes, rows_list)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for shape in shapes:
        for name, N, K, fused in SHAPES[shape]:
            for rows in rows_list:
                if time.monotonic() - began > options.seconds:
                    continue
                made = operands(N, K, fused, rows)
                timed, library = {}, 1e6 * seconds_a_launch(launches(made, None))
                for setting in settings(rows, K, fused):
                    timed[setting] = 1e6 * seconds_a_launch(launches(made, setting))
                best = sorted(timed.items(), key=lambda item: item[1])[:BEST]
                text = "  ".join(f"{'/'.join(map(str, s[-4:]))} {took:.2f}" for s, took in best)
                print(f"{shape} {name} {N}x{K} M={rows}: {text}  cuBLAS {library:.2f}", flush=True)
                results.append((N, K, fused, rows, [(s, round(t, 2)) for s, t in timed.items()]))
    print(json.dumps({"seconds": round(time.monotonic() - began, 1), "us": results}))


if __name__ == "__main__":
    main()
