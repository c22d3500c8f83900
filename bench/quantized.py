"""Products with quantized weights alone: our kernels beside the library's, and bfloat16's.

    python bench/quantized.py [--kinds w4,w4z,fp8,...] [--rows 1,2,...] [--seconds 120]

Shapes are Llama-3.1-8B's, of a layer's four products and, together, of a layer. Every launch of a
graph has another copy of its weight, and the copies exceed the L2 cache several times. Columns are
µs of a product and TB/s of its weight:

    vector, tiles   ``zlm.kernels.quantized_linear`` by rows, and by the matrix units
    spread          as ``zlm.ops.gpu_quantized`` has many rows: spread out, then cuBLAS
    float8          x rounded by rows, then the library's float8 product
    bf16            cuBLAS over the plain weight

The last line is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from gpu_kernels import seconds_a_launch
from torch import Tensor
from zlm.kernels import quantized_linear, quantized_vector
from zlm.kernels.quantized_codes import Codes

from zlm.ops import gpu_packing
from zlm.ops.block_matrix import BlockMatrix
from zlm.ops.gpu_quantized import Means, QuantizedCore
from zlm.weights.online import float8, four_bits
from zlm.worker.kernel_farm import compile_all
from zlm.worker.kernel_variants import Recorder

SHAPES = {  # (rows of the weight, K, activation, residual)
    "qkv": (6144, 4096, "", False),
    "out": (4096, 4096, "", True),
    "gate": (28672, 4096, "silu", False),
    "down": (4096, 14336, "", True),
}
COLD_BYTES = 256 * 2**20
MOST_COPIES = 32


def matrix(kind: str, N: int, K: int) -> BlockMatrix:
    """Return a random weight: w4 symmetric, w4z with zeros, w4o in groups of 32, fp8b in blocks."""
    weight = torch.randn(N, K, device="cuda") * K**-0.5
    if kind in ("fp8", "fp8b"):
        made = float8(weight)
        shared = torch.rand(-(-N // 128), K // 128, device="cuda") / K
        return made if kind == "fp8" else BlockMatrix(made.codes, shared, None, (128, 128))
    four = four_bits(weight)
    assert four is not None
    if kind == "w4":
        return four
    if kind == "int8":
        codes = torch.randint(-127, 128, (N, K), device="cuda").to(torch.int8)
        return BlockMatrix(codes, four.scales[:, :1] / 16, None, (1, K))
    if kind == "w4z":
        zeros = torch.randint(0, 16, four.scales.shape, device="cuda")
        return BlockMatrix(four.codes, four.scales, four.scales * -zeros, four.block)
    scales = four.scales.repeat_interleave(4, 1)
    offsets = torch.randn(scales.shape, device="cuda") * scales
    return BlockMatrix(four.codes, scales, offsets, (1, 32))


def copies(weight: Codes) -> list[Codes]:
    """Return *weight* often enough that no copy is in the cache when its turn comes."""
    count = min(MOST_COPIES, max(2, -(-COLD_BYTES // weight.nbytes)))
    beside = [None if t is None else [t.clone() for _ in range(count)]
              for t in (weight.zeros, weight.offsets)]  # fmt: skip
    return [
        Codes(
            weight.data.clone(), weight.scales.clone(), weight.group, weight.zero,
            *(None if kept is None else kept[i] for kept in beside),
        )
        for i in range(count)
    ]  # fmt: skip


def ways(
    weights: list[Codes], x: Tensor, activation: str, residual: Tensor | None
) -> dict[str, list[Callable[[], object]]]:
    """Return the launches of each way of computing the product with *x*."""
    rows, wide = x.shape[0], weights[0].shape[0] // (2 if activation else 1)
    out = x.new_empty(rows, wide)
    means = Means(torch.bfloat16, torch.bfloat16, False, True, True)
    found: dict[str, list[Callable[[], object]]] = {}

    def ours(weight: Codes, *, by_rows: bool) -> Callable[[], object]:
        values = quantized_linear.scratch_values(
            rows, weight, activation=activation, by_rows=by_rows, tiles=not by_rows
        )
        return partial(
            quantized_linear.linear, x, weight, out=out, residual=residual,
            activation=activation, scratch=torch.empty(values, device="cuda"), by_rows=by_rows,
            tiles=not by_rows, pdl=True,
        )  # fmt: skip

    if rows <= 4 and quantized_vector.takes(weights[0]):
        found["vector"] = [ours(weight, by_rows=True) for weight in weights]
    if rows <= quantized_linear.MOST_ROWS:
        found["tiles"] = [ours(weight, by_rows=False) for weight in weights]
    cores = [QuantizedCore(weight, None, None, activation, means) for weight in weights]
    for core in cores:
        core.most = 0
    if cores[0].rounds and rows > 1:
        found["float8"] = [partial(core, x, None, residual) for core in cores]
    elif rows > 16:
        found["spread"] = [partial(core, x, None, residual) for core in cores]
    return found


def plain(N: int, K: int, x: Tensor) -> list[Callable[[], object]]:
    """Return launches of cuBLAS over copies of a bfloat16 weight."""
    count = min(MOST_COPIES, max(2, -(-COLD_BYTES // (N * K * 2))))
    weights = torch.randn(count, N, K, device="cuda", dtype=torch.bfloat16)
    out = x.new_empty(x.shape[0], N)
    return [partial(torch.mm, x, weight.t(), out=out) for weight in weights]


def compile_ahead(kinds: list[str], rows_list: list[int]) -> None:
    """Compile what the cases launch, many kernels at a time."""
    with Recorder() as recorder:
        for kind in kinds:
            for N, K, activation, adds in SHAPES.values():
                packed = gpu_packing.pack(matrix(kind, N, K), torch.device("cuda"))
                assert packed is not None
                for rows in rows_list:
                    x = torch.zeros(rows, K, device="cuda", dtype=torch.bfloat16)
                    residual = x.new_zeros(rows, N) if adds else None
                    for launches in ways([packed], x, activation, residual).values():
                        launches[0]()
    compile_all(recorder.variants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="w4,w4z,w4o,fp8,int8")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,1024,8192")
    parser.add_argument("--vector-rows", default="", help="of a thread: of 4 bits,of 8 bits")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no case after this")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.vector_rows:
        four, eight = map(int, options.vector_rows.split(","))
        quantized_vector.ROWS.update({4: four, 8: eight})
    rows_list = [int(rows) for rows in options.rows.split(",")]
    compile_ahead(options.kinds.split(","), rows_list)
    began, results = time.monotonic(), []
    for kind in ("bf16", *options.kinds.split(",")):
        totals: dict[tuple[int, str], float] = {}
        for name, (N, K, activation, adds) in SHAPES.items():
            weights = []
            if kind != "bf16":
                packed = gpu_packing.pack(matrix(kind, N, K), torch.device("cuda"))
                assert packed is not None
                weights = copies(packed)
            size = weights[0].nbytes if weights else N * K * 2
            for rows in rows_list:
                if time.monotonic() - began > options.seconds:
                    break
                x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
                residual = x.new_zeros(rows, N) if adds else None
                found = ways(weights, x, activation, residual) if weights else {
                    "bf16": plain(N, K, x)
                }  # fmt: skip
                line = f"{kind:5} {name:5} M={rows:<5}"
                for way, launches in found.items():
                    took = seconds_a_launch(launches) * 1e6
                    line += f"  {way} {took:.1f} ({size / took / 1e6:.2f})"
                    totals[rows, way] = totals.get((rows, way), 0.0) + took
                    results.append((kind, name, rows, way, round(took, 2)))
                print(line, flush=True)
            del weights
            torch.cuda.empty_cache()
        for (rows, way), took in sorted(totals.items()):
            print(f"{kind:5} layer M={rows:<5}  {way} {took:.1f}", flush=True)
    print(json.dumps({"us": results}))


if __name__ == "__main__":
    main()
