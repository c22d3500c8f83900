"""Mixtures of experts alone: each launch of a layer, and settings that may beat the tables'.

    python bench/moe.py [--only TEXT] [--seconds 150]

A row is a shape, a kind of weights and a number of tokens; its columns are µs of routing and plan,
of both products by the table's setting, of the sum, and of a layer, with TB/s of the weights that
are read or TFLOP/s. Below stand settings that beat it, for the inner and the outer product. Every
launch of a graph routes its tokens at random, so that weights come from memory; each setting's
result is compared with the table's. The last line is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_kernels import Launch, seconds_a_launch
from torch import Tensor
from zlm.kernels import moe, moe_plan, quantized_codes, quantized_moe
from zlm.kernels.moe import Activation, ExpertTensors
from zlm.kernels.quantized_moe import ExpertCodes

from zlm.worker.kernel_farm import compile_all
from zlm.worker.kernel_variants import Recorder

DTYPE = torch.bfloat16
ROUTINGS = 6
TOKENS = (1, 8, 64, 256, 8192)
BYTES = {"bf16": 2.0, "fp8": 1.0, "w4": 0.53, "mxfp4": 0.53}


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of experts; kinds: of weights that are measured."""

    name: str
    count: int
    chosen: int
    hidden: int
    width: int
    kinds: tuple[str, ...]


SHAPES = [
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768, ("bf16", "fp8", "w4")),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, ("mxfp4",)),
    Shape("mixtral-8x7b", 8, 2, 4096, 14336, ("bf16", "w4")),
]
# Settings by pairs of an expert on average: of plain weights BM, BN, BK, stages, warps; of codes
# BM, BN, stages, warps.
PLAIN = {
    16: [
        (16, 32, 128, 4, 4), (16, 64, 128, 3, 4), (16, 128, 64, 3, 4), (16, 64, 64, 6, 4),
        (16, 32, 64, 6, 2), (16, 128, 128, 2, 8),
    ],
    64: [(32, 128, 64, 3, 4), (64, 64, 64, 3, 4), (32, 64, 128, 3, 4), (64, 128, 64, 3, 8)],
    2**31: [
        (64, 128, 64, 3, 4), (64, 128, 64, 4, 8), (128, 64, 64, 3, 4), (128, 64, 64, 4, 8),
        (128, 128, 64, 3, 8), (128, 128, 64, 4, 8), (128, 256, 64, 3, 8),
    ],
}  # fmt: skip
CODES = {
    16: [(8, 64, 4, 2), (16, 64, 4, 4), (16, 32, 4, 4), (16, 128, 3, 4), (16, 64, 2, 2)],
    64: [(32, 64, 4, 4), (64, 64, 3, 4), (32, 128, 3, 4), (32, 128, 3, 8)],
    2**31: [(64, 128, 3, 8), (128, 64, 3, 8), (128, 128, 3, 8), (64, 64, 4, 4), (64, 128, 3, 4)],
}


def weights_of(shape: Shape, kind: str) -> ExpertTensors | ExpertCodes:
    """Return random experts; that codes mean little does not matter here."""
    both, down = (
        (shape.count * 2 * shape.width, shape.hidden),
        (shape.count * shape.hidden, shape.width),
    )
    if kind == "bf16":
        plain = [torch.randn(n, k, device="cuda", dtype=DTYPE) * k**-0.5 for n, k in (both, down)]
        return ExpertTensors(*(each.view(shape.count, -1, each.shape[1]) for each in plain))
    return ExpertCodes(*(_codes(kind, n, k) for n, k in (both, down)))


def _codes(kind: str, rows: int, columns: int) -> quantized_codes.Codes:
    if kind == "fp8":
        values = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.full((rows, 1), columns**-0.5, device="cuda")
        return quantized_codes.Codes(quantized_codes.pack(values, 8), scales, columns)
    group = 32 if kind == "mxfp4" else 128
    values = torch.randint(0, 16, (rows, columns), device="cuda", dtype=torch.uint8)
    scales = torch.full((rows, columns // group), columns**-0.5 / 4, device="cuda").half()
    made = quantized_codes.Codes(quantized_codes.pack(values, 4), scales, group, 8)
    return replace(made, zero=0, floats=True) if kind == "mxfp4" else made


class Layer:
    """The launches of a layer for a number of tokens, ROUTINGS of each."""

    def __init__(self, shape: Shape, kind: str, weights: ExpertTensors | ExpertCodes, tokens: int):
        self.shape, self.kind, self.weights, self.tokens = shape, kind, weights, tokens
        self.pairs = tokens * shape.chosen
        torch.manual_seed(tokens)
        self.x = torch.randn(tokens, shape.hidden, device="cuda", dtype=DTYPE)
        self.logits = torch.randn(ROUTINGS, tokens, shape.count, device="cuda")
        self.experts = torch.empty(ROUTINGS, tokens, shape.chosen, device="cuda", dtype=torch.int32)
        self.shares = torch.empty(self.experts.shape, device="cuda")
        self.gated = torch.zeros(self.pairs, shape.width, device="cuda", dtype=DTYPE)
        self.results = torch.zeros(self.pairs, shape.hidden, device="cuda", dtype=DTYPE)
        self.kernels: Any = moe if kind == "bf16" else quantized_moe
        self.activation = Activation("silu")
        if kind == "bf16":
            self.setting: tuple[int, ...] = moe.tile_setting(
                DTYPE, self.pairs, shape.count, fixed=False
            )
        else:
            self.setting = quantized_moe.tile_setting(self.pairs, shape.count, fixed=False)

    def candidates(self) -> list[tuple[int, ...]]:
        table: Any = PLAIN if self.kind == "bf16" else CODES
        return next(found for most, found in table.items() if self.pairs <= most * self.shape.count)

    def plans(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        size = moe_plan.num_tiles(self.pairs, self.shape.count, rows), moe_plan.TILE_INTS
        return [
            (
                torch.empty(self.pairs, device="cuda", dtype=torch.int32),
                torch.empty(size, device="cuda", dtype=torch.int32),
            )
            for _ in range(ROUTINGS)
        ]

    def route(self) -> list[Launch]:
        each = zip(self.logits, self.experts, self.shares, strict=True)
        run = partial(moe_plan.route, normalize=True)
        return [partial(run, given, experts=e, shares=s) for given, e, s in each]

    def plan(self, plans: list[tuple[Tensor, Tensor]], rows: int) -> list[Launch]:
        return [
            partial(moe_plan.plan, experts, self.shape.count, rows, order=order, tiles=tiles)
            for experts, (order, tiles) in zip(self.experts, plans, strict=True)
        ]

    def inner(self, plans: list[tuple[Tensor, Tensor]], setting: tuple[int, ...]) -> list[Launch]:
        run = partial(self.kernels.inner, self.x, self.weights)
        return [partial(run, *plan, setting, self.activation, out=self.gated) for plan in plans]

    def outer(self, plans: list[tuple[Tensor, Tensor]], setting: tuple[int, ...]) -> list[Launch]:
        run = partial(self.kernels.outer, self.gated, self.weights)
        each = zip(self.shares, plans, strict=True)
        return [partial(run, shares, *plan, setting, out=self.results) for shares, plan in each]

    def combine(self) -> list[Launch]:
        return [partial(moe.combine, self.results, self.x.clone(), out=self.x.clone())] * 2

    def work(self, columns: int) -> tuple[float, float]:
        """Return bytes and operations of a product of *columns* columns of weights of an expert."""
        touched = min(self.shape.count, len(self.experts[0].unique()))
        values = columns * self.shape.hidden
        return touched * values * BYTES[self.kind], 2.0 * self.pairs * values

    def products(self) -> Iterator[tuple[str, int, Callable[..., list[Launch]], Tensor]]:
        yield "inner", 2 * self.shape.width, self.inner, self.gated
        yield "outer", self.shape.width, self.outer, self.results


def launches(layer: Layer) -> Iterator[Launch]:
    """Yield one launch of each that ``measure`` measures."""
    for setting in (layer.setting, *layer.candidates()):
        plans = layer.plans(setting[0])
        yield layer.plan(plans, setting[0])[0]
        for _, _, make, _ in layer.products():
            yield make(plans, setting)[0]
    yield layer.route()[0]
    yield layer.combine()[0]


def measure(layer: Layer) -> dict[str, object]:
    """Print a row and what beats it; return the figures."""
    route = seconds_a_launch(layer.route())
    own = layer.plans(layer.setting[0])
    plan = seconds_a_launch(layer.plan(own, layer.setting[0]))
    combine = seconds_a_launch(layer.combine())
    row: dict[str, Any] = {"route": route, "plan": plan, "combine": combine}
    cells, better = [], []
    for name, columns, make, result in layer.products():
        row[name] = seconds_a_launch(make(own, layer.setting))
        wanted = result.float()
        moved, operations = layer.work(columns)
        rate = f"{moved / row[name] / 1e12:.2f} TB/s, {operations / row[name] / 1e12:.0f} TFLOP/s"
        cells.append(f"{name} {row[name] * 1e6:.1f} ({rate})")
        for setting in layer.candidates():
            plans = layer.plans(setting[0])
            for launch in layer.plan(plans, setting[0]):
                launch()
            try:
                seconds = seconds_a_launch(make(plans, setting))
            except Exception as error:  # no room on the card: said, and passed over
                better.append(f"{name} {setting} {type(error).__name__}")
                continue
            off = float((result.float() - wanted).norm() / wanted.norm())
            row[f"{name} {setting}"] = seconds
            mark = "" if off < 1e-2 else f" WRONG by {off:.3f}"
            better.append(f"{name} {setting} {seconds * 1e6:.1f}{mark}")
        make(own, layer.setting)[-1]()
    total = route + plan + combine + row["inner"] + row["outer"]
    label = f"{layer.shape.name} {layer.kind} {layer.tokens}"
    print(f"{label:<28} {layer.setting} route {route * 1e6:.1f} plan {plan * 1e6:.1f}", *cells,
          f"combine {combine * 1e6:.1f} layer {total * 1e6:.1f}", flush=True)  # fmt: skip
    for each in better:
        print("   ", each, flush=True)
    return {
        "row": label,
        "setting": layer.setting,
        "us": {k: round(v * 1e6, 2) for k, v in row.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose shape and kind contain this")
    parser.add_argument("--seconds", type=float, default=150.0, help="start no row after this")
    options = parser.parse_args()
    began, rows, skipped = time.monotonic(), [], []
    for shape in SHAPES:
        for kind in shape.kinds:
            if options.only not in f"{shape.name} {kind}":
                continue
            weights = weights_of(shape, kind)
            layers = [Layer(shape, kind, weights, tokens) for tokens in TOKENS]
            with Recorder() as recorder:
                for launch in (launch for layer in layers for launch in launches(layer)):
                    launch()
            compile_all(recorder.variants)
            for layer in layers:
                if time.monotonic() - began > options.seconds:
                    skipped.append(f"{shape.name} {kind} {layer.tokens}")
                    continue
                rows.append(measure(layer))
            del weights, layers
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "skipped": skipped, "rows": rows}))


if __name__ == "__main__":
    main()
