"""Time of a decode step's chain of kernels, by how it is launched and who multiplies.

    python bench/kernel_chain.py [--shapes smollm2-135m,...] [--rows 1,2,4,...] [--trigger last]
                                 [--seconds 60]

Builds the models of ``bench/shapes`` with random bfloat16 weights, captures a graph of a decode
step for each number of rows (embedding, all layers over a context of ``CONTEXT`` tokens, logits)
and prints the median time of a replay in µs. Columns:

    plain, pdl    as the backend does it, without and with overlapping launches
    all           1 row: large products overlap too
    library       cuBLAS for every product, with overlapping launches elsewhere
    together      2 to 4 rows: a program of the vector product does all of them
    own           our kernel for every product (2 to 4 rows: the one with matrix units)
    tiles         small weights by tiles, after norms of their own
    -qkv ...      own, but for this product, which cuBLAS does: less than own is a reason to do so

``--trigger first`` lets a kernel's successor start before the kernel's own wait is over. The last
line is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from gpu_kernels import seconds_a_launch
from torch import Tensor
from zlm.kernels import chain, linear_gemv, linear_small
from zlm.kernels.linear_epilogue import SMALL_BYTES

from zlm.config import ModelSpec, kv_groups
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.ops.gpu import GpuOps
from zlm.ops.gpu_linear import GpuGatedProduct, GpuProduct, Reach, reach
from zlm.worker.dummy_weights import DummyWeights
from zlm.worker.kernel_farm import Farm
from zlm.worker.kernel_variants import Recorder, current_target

SHAPES = ("smollm2-135m", "gemma-3-270m", "qwen3-0.6b", "llama-3.1-8b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
PRODUCTS = ("qkv", "out", "gated", "down", "head")
CONTEXT, BLOCK_SIZE = 64, 16
VECTOR_ROWS = linear_small.VECTOR_ROWS
SPLIT_BYTES = linear_gemv.SMALL_BYTES


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of computing a step; ``library``: the products that cuBLAS does, None: as it comes."""

    name: str
    pdl: bool = True
    library: frozenset[str] | None = None
    vector_rows: int = VECTOR_ROWS
    split_bytes: int = SPLIT_BYTES
    overlap_all: bool = False  # large products too
    tiles: bool = False  # tiles for all small weights, after norms of their own


@dataclass
class Chain:
    """A model over caches for up to ``max(ROWS)`` rows."""

    spec: ModelSpec
    ops: GpuOps
    model: Any
    caches: list[Tensor]
    batches: dict[int, StepBatch] = field(default_factory=dict)

    def step(self, rows: int) -> Tensor:
        """Launch a decode step."""
        if rows not in self.batches:
            self.batches[rows] = self._batch(rows)
        return self.model.logits(self.model.forward(self.batches[rows], self.caches))

    def _batch(self, rows: int) -> StepBatch:
        device = self.ops.device
        width = CONTEXT // BLOCK_SIZE
        table = 1 + torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
        slots = table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
        return StepBatch(
            token_ids=torch.randint(0, self.spec.vocab_size, (rows,), device=device),
            positions=torch.full((rows,), CONTEXT - 1, dtype=torch.int64, device=device),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.full((rows,), CONTEXT, dtype=torch.int32, device=device),
            num_decodes=rows,
            query_lens=[],
            context_lens=[],
            groups=[
                GroupBatch(slots, table, group.window_tokens) for group in kv_groups(self.spec)
            ],
        )

    def configure(self, variant: Variant) -> None:
        """Have every operation of the model compute as *variant* says."""
        self.ops.pdl = variant.pdl
        linear_small.VECTOR_ROWS = variant.vector_rows
        linear_gemv.SMALL_BYTES = variant.split_bytes
        named = {self.model.head.product: "head"}
        for layer in self.model.layers:
            named |= {layer.attention.qkv: "qkv", layer.attention.out: "out"}
            named |= {layer.mlp.gated: "gated", layer.mlp.down: "down"}
        for part in _parts(self.model, set()):
            if hasattr(part, "pdl"):
                part.pdl = variant.pdl
            if not isinstance(part, GpuProduct | GpuGatedProduct):
                continue
            part.reach = reach(part.weight, pdl=variant.pdl)
            if variant.overlap_all:
                part.reach = replace(part.reach, overlaps=True)
            if variant.library is not None:
                own = 0 if named[part] in variant.library else linear_small.MOST_ROWS
                part.reach = Reach(own, part.reach.overlaps, norms=True)
            if variant.tiles and part.weight.nbytes <= SMALL_BYTES:
                rows = range(VECTOR_ROWS + 1, linear_small.MOST_ROWS + 1)
                part.reach = replace(part.reach, rows=VECTOR_ROWS, tiles=rows)


def _parts(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the objects of zlm that *thing* is made of."""
    if id(thing) in seen or not type(thing).__module__.startswith("zlm."):
        return
    seen.add(id(thing))
    yield thing
    for value in vars(thing).values() if hasattr(thing, "__dict__") else ():
        for part in value if isinstance(value, list | tuple) else [value]:
            yield from _parts(part, seen)


def variants(rows: int, *, brief: bool) -> list[Variant]:
    """Return what is compared at *rows* rows."""
    library, own = frozenset(PRODUCTS), frozenset[str]()
    plain, overlapping = Variant("plain", pdl=False), Variant("pdl")
    if rows > linear_small.MOST_ROWS:
        return [plain, overlapping]
    if rows <= VECTOR_ROWS:
        found = [plain, overlapping]
        if rows == 1:
            found.append(Variant("all", overlap_all=True))
        else:
            found.append(Variant("library", library=library))
            found.append(Variant("together", split_bytes=0))
            found.append(Variant("own", library=own, vector_rows=1))
    else:
        found = [plain, overlapping, Variant("library", library=library)]
        found.append(Variant("own", library=own))
        found.append(Variant("tiles", tiles=True))
        found += [Variant(f"-{name}", library=frozenset({name})) for name in PRODUCTS]
    if brief:
        return [variant for variant in found if variant.name in ("pdl", "own")]
    return found


def build(shape: str, device: torch.device, most_rows: int) -> Chain:
    """Return the model of *shape* with random weights."""
    spec = load_spec(str(Path(__file__).with_name("shapes") / shape))
    ops = GpuOps(device, torch.bfloat16, pdl=True)
    with torch.inference_mode():
        weights = DummyWeights(spec, 0, device)
        model = registry.build(spec, weights, ops=ops, max_model_len=2 * CONTEXT)
        blocks = 1 + most_rows * CONTEXT // BLOCK_SIZE
        size = (blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        caches = [ops.allocate_cache(*size, torch.bfloat16) for _ in range(spec.num_layers)]
    return Chain(spec, ops, model, caches)


def compile_ahead(made: Chain, cases: list[tuple[int, Variant]], farm: Farm) -> None:
    """Compile what *cases* need, many kernels at a time."""
    with Recorder() as recorder:
        for rows, variant in cases:
            made.configure(variant)
            made.step(rows)
    for variant, error in farm.compile(recorder.variants, current_target()).items():
        print(f"{variant.name} was not compiled ahead: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--trigger", choices=("last", "first"), default="last")
    parser.add_argument("--seconds", type=float, default=60.0, help="start no graph after this")
    options = parser.parse_args()
    first = options.trigger == "first"
    chain.TRIGGER_FIRST = tl.constexpr(first)
    began, results = time.monotonic(), []
    rows_list = [int(rows) for rows in options.rows.split(",")]
    torch.set_grad_enabled(False)
    farm = None if first else Farm()  # compiling processes know nothing of the trigger
    for shape in options.shapes.split(","):
        made = build(shape, torch.device("cuda"), max(rows_list))
        cases = [(rows, v) for rows in rows_list for v in variants(rows, brief=first)]
        if farm is not None:
            compile_ahead(made, cases, farm)
        print(f"{shape}, trigger {options.trigger} ({time.monotonic() - began:.0f} s)", flush=True)
        for rows in rows_list:
            line = f"  M={rows:<4}"
            for variant in (v for r, v in cases if r == rows):
                if time.monotonic() - began > options.seconds:
                    break
                made.configure(variant)
                took = seconds_a_launch([partial(made.step, rows)]) * 1e6
                line += f" {variant.name} {took:.0f}"
                results.append((shape, rows, variant.name, round(took, 1)))
            print(line, flush=True)
        del made
        torch.cuda.empty_cache()
    if farm is not None:
        farm.close()
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"trigger": options.trigger, "seconds": seconds, "us": results}))


if __name__ == "__main__":
    main()
