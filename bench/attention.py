"""Settings of the attention kernels side by side: those of their tables, and what may beat them.

    python bench/attention.py [--only TEXT] [--seconds 90]

Tables whose name ends in "fp8" are of caches of e4m3.

A line is a setting, a column a batch; the figures are medians of a launch inside one CUDA graph of
30 layers or more, each with its own cache, which together exceed the second-level cache. Every
setting's result is compared with that of the first in its table, and with itself run again.
Settings are compiled in processes side by side first. The last line is one JSON document.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpu_kernels import COLD_BYTES, DTYPE, SHAPES, Launch, Shape, seconds_a_launch
from torch import Tensor
from zlm.kernels import (
    attention_decode as decode,
    attention_decode_plan as planning,
    attention_prefill as prefill,
    attention_prefill_plan as tiling,
)
from zlm.kernels.attention_decode_plan import DecodeConfig
from zlm.kernels.attention_prefill_plan import PrefillConfig
from zlm.kernels.kv_fp8 import FP8

BLOCK_SIZE = 16
CUDA = torch.device("cuda")
LAYERS = 30
MOST_LAYERS = 800
COMPILERS = 12  # processes

# Tried beside what the kernels' tables hold, by head_dim.
DECODES = {
    64: [DecodeConfig(64, 4, 3, 4, spare=8), DecodeConfig(32, 2, 3, 8), DecodeConfig(64, 4, 4, 4)],
    128: [DecodeConfig(64, 4, 3, 3), DecodeConfig(32, 4, 3, 4, spare=16)],
    256: [DecodeConfig(32, 4, 3, 2, spare=16), DecodeConfig(32, 8, 3, 2)],
}
PREFILLS = {
    64: [PrefillConfig(128, 64, 8, 3, 2), PrefillConfig(128, 64, 4, 3, 2)],
    128: [PrefillConfig(64, 64, 4, 3, 2), PrefillConfig(128, 64, 8, 4)],
    256: [PrefillConfig(128, 64, 8, 2)],
}
FP8_DECODES = {
    64: [DecodeConfig(64, 4, 3, 6), DecodeConfig(64, 2, 4, 8), DecodeConfig(32, 2, 4, 8)],
    128: [
        DecodeConfig(64, 4, 4, 4),
        DecodeConfig(64, 4, 4, 3),
        DecodeConfig(64, 4, 3, 3),
        DecodeConfig(32, 4, 4, 4),
        DecodeConfig(128, 8, 3, 2),
        DecodeConfig(128, 4, 3, 2),
    ],
    256: [DecodeConfig(32, 4, 4, 3, least=3), DecodeConfig(64, 8, 3, 2, least=2)],
}
FP8_PREFILLS = {
    64: [PrefillConfig(64, 64, 4, 2, 3), PrefillConfig(64, 32, 4, 3, 3)],
    128: [
        PrefillConfig(128, 64, 8, 3),
        PrefillConfig(128, 64, 8, 2),
        PrefillConfig(128, 32, 8, 2, 2),
        PrefillConfig(128, 32, 8, 3, 2),
        PrefillConfig(128, 128, 8, 2),
        PrefillConfig(64, 64, 4, 2, 2),
        PrefillConfig(64, 32, 4, 3, 3),
        PrefillConfig(64, 64, 4, 3, 3),
    ],
    256: [
        PrefillConfig(128, 64, 8, 2),
        PrefillConfig(128, 32, 8, 2),
        PrefillConfig(64, 32, 4, 3),
        PrefillConfig(64, 32, 4, 2, 2),
        PrefillConfig(64, 64, 4, 2),
    ],
}
FP8_SHAPES = ("gemma-3-270m", "llama-3.1-8b")
DECODE_BATCHES = {  # rows and context of each row
    "smollm2-135m": [(1, 300), (8, 530), (16, 530), (64, 530), (256, 530)],
    "qwen3-0.6b": [(1, 640), (16, 640), (64, 640), (256, 640)],
    "gemma-3-270m": [(1, 640), (16, 640), (64, 640), (256, 640)],
    "llama-3.1-8b": [(1, 640), (8, 640), (16, 640), (64, 640), (256, 640), (64, 4096)],
}
PREFILL_BATCHES = {  # rows and length of whole prompts
    "smollm2-135m": [(16, 512), (4, 2048)],
    "gemma-3-270m": [(16, 512), (4, 2048)],
    "llama-3.1-8b": [(16, 512), (4, 2048), (2, 4096)],
}


@dataclass(frozen=True, slots=True)
class Table:
    """One shape and window of one kernel: its settings, its batches, and what makes launches.

    ``make(config, rows, context, layers, pdl)`` returns the output and the launches.
    """

    name: str
    configs: list[DecodeConfig] | list[PrefillConfig]  # the kernel's own first
    batches: list[tuple[int, int]]
    make: Callable[..., tuple[Tensor, list[Launch]]]
    work: Callable[[int, int], tuple[int, int]]  # bytes and operations of a launch


def caches(
    shape: Shape, rows: int, context: int, layers: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Return a filled cache of *dtype* for each layer, and the table of all."""
    width = -(-context // BLOCK_SIZE)
    size = (1 + rows * width, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim)
    one = torch.empty(size, dtype=DTYPE, device="cuda").normal_().to(dtype)
    table = (torch.randperm(rows * width, device="cuda").int() + 1).view(rows, width)
    return [one, *(one.clone() for _ in range(layers - 1))], table


def decodes(
    shape: Shape,
    window: int,
    dtype: torch.dtype,
    config: DecodeConfig,
    rows: int,
    context: int,
    layers: int,
    pdl: bool,
) -> tuple[Tensor, list[Launch]]:
    device = torch.device("cuda")
    geometry = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    workspace = planning.allocate_workspace(*geometry, DTYPE, device, configs=(config, config))
    scales = kv_scales(shape, dtype)
    seq_lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    plan = torch.empty(planning.plan_size(rows, workspace), dtype=torch.int32, device=device)
    where = {"num_kv_heads": shape.num_kv_heads, "window": window}
    planning.plan_decode(seq_lens, out=plan, workspace=workspace, **where)
    layer_caches, table = caches(shape, rows, context, layers, dtype)
    torch.manual_seed(0)
    q = torch.randn((rows, shape.num_heads, shape.head_dim), device=device).to(DTYPE)
    out = torch.empty_like(q)
    launches = [
        partial(
            decode.attention_decode,
            q,
            cache,
            table,
            seq_lens,
            plan,
            out=out,
            workspace=workspace,
            kv_scales=scales,
            scale=shape.head_dim**-0.5,
            window=window,
            pdl=pdl,
        )
        for cache in layer_caches
    ]
    return out, launches


def prefills(
    shape: Shape,
    window: int,
    dtype: torch.dtype,
    config: PrefillConfig,
    rows: int,
    context: int,
    layers: int,
    pdl: bool,
) -> tuple[Tensor, list[Launch]]:
    device = torch.device("cuda")
    geometry = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    tokens = rows * context
    seq_lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    starts = torch.arange(0, tokens + 1, context, dtype=torch.int32, device=device)
    queries = tiling.tile_queries(*geometry, DTYPE, device, config)
    items = tiling.num_tiles(tokens, rows, queries)
    plan = torch.empty((items, 2), dtype=torch.int32, device=device)
    tiling.plan_prefill(starts, seq_lens, out=plan, queries=queries, window=window)
    layer_caches, table = caches(shape, rows, context, layers, dtype)
    torch.manual_seed(0)
    q = torch.randn((tokens, shape.num_heads, shape.head_dim), device=device).to(DTYPE)
    out = torch.empty_like(q)
    launches = [
        partial(
            prefill.attention_prefill,
            q,
            cache,
            table,
            starts,
            seq_lens,
            plan,
            out=out,
            kv_scales=kv_scales(shape, dtype),
            scale=shape.head_dim**-0.5,
            window=window,
            pdl=pdl,
            config=config,
        )
        for cache in layer_caches
    ]
    return out, launches


def kv_scales(shape: Shape, dtype: torch.dtype) -> Tensor | None:
    """Return scales for a cache of e4m3, as a checkpoint brings them."""
    if dtype.itemsize > 1:
        return None
    return torch.full((2, shape.num_kv_heads), 1.25, device="cuda")


def decode_bytes(
    shape: Shape, window: int, dtype: torch.dtype, rows: int, context: int
) -> tuple[int, int]:
    seen = rows * (min(context, window) if window else context)
    moved = seen * shape.token_bytes * dtype.itemsize // DTYPE.itemsize
    return moved, 4 * seen * shape.num_heads * shape.head_dim


def prefill_work(
    shape: Shape, window: int, dtype: torch.dtype, rows: int, context: int
) -> tuple[int, int]:
    ends = range(1, context + 1)
    pairs = rows * sum(min(end, window) if window else end for end in ends)
    return rows * context * shape.token_bytes, 4 * pairs * shape.num_heads * shape.head_dim


def tables() -> list[Table]:
    """Return all tables; a setting of few rows is measured on many too, and the other way round."""
    found = []
    kinds = [(shape, DTYPE) for shape in SHAPES]
    kinds += [(shape, FP8) for shape in SHAPES if shape.name in FP8_SHAPES]
    prefill_tables = tiling.CONFIGS.get(torch.cuda.get_device_name(), tiling.DEFAULT_CONFIGS)
    for shape, dtype in kinds:
        dim = shape.head_dim
        more = DECODES[dim] if dtype == DTYPE else FP8_DECODES[dim]
        for_decode = list(dict.fromkeys((*planning.settings(CUDA, dim, dtype), *more)))
        others = PREFILLS[dim] if dtype == DTYPE else FP8_PREFILLS[dim]
        for_prefill = list(dict.fromkeys((prefill_tables[dim], *others)))
        for window in shape.windows:
            name = shape.name + (f" window {window}" if window else "")
            name += " fp8" if dtype == FP8 else ""
            batches = DECODE_BATCHES[shape.name]
            make = partial(decodes, shape, window, dtype)
            work = partial(decode_bytes, shape, window, dtype)
            found.append(Table(f"decode {name}", for_decode, batches, make, work))
            if shape.name in PREFILL_BATCHES:
                batches = PREFILL_BATCHES[shape.name]
                make = partial(prefills, shape, window, dtype)
                work = partial(prefill_work, shape, window, dtype)
                found.append(Table(f"prefill {name}", for_prefill, batches, make, work))
    return sorted(found, key=lambda table: table.name)


def label(config: DecodeConfig | PrefillConfig) -> str:
    """Return the setting as it is written in the kernel's table."""
    if isinstance(config, PrefillConfig):
        values = (config.block_m, config.block_n, config.warps, config.stages, config.programs)
        return " ".join(map(str, values))
    text = f"{config.tile} {config.warps} {config.stages} {config.programs}"
    return text + (f" least={config.least}" if config.least > 1 else "")


def compile_share(chosen: list[Table], part: int) -> None:
    """Compile every COMPILERS-th setting, from *part* on, by launching it on a small batch."""
    jobs = [(table, config) for table in chosen for config in table.configs]
    for table, config in jobs[part::COMPILERS]:
        for launch in table.make(config, 2, 64, 1, table.name.startswith("decode"))[1]:
            launch()
    torch.cuda.synchronize()


def measure(table: Table) -> list[dict[str, object]]:
    """Print the table's lines and return their figures."""
    widths = [f"{rows}x{context}" for rows, context in table.batches]
    print(f"\n{table.name:<32}" + "".join(f"{width:>22}" for width in widths), flush=True)
    is_decode = table.name.startswith("decode")
    first: list[Tensor] = []
    rows_out: list[dict[str, object]] = []
    plain = [(table.configs[0], False)] if is_decode else []
    for config, pdl in [*((config, is_decode) for config in table.configs), *plain]:
        line = f"{label(config) + ('' if pdl == is_decode else ' no pdl'):<32}"
        for index, (rows, context) in enumerate(table.batches):
            moved, operations = table.work(rows, context)
            layers = max(LAYERS, min(MOST_LAYERS, -(-COLD_BYTES // moved))) if is_decode else 4
            torch.manual_seed(1)
            out, launches = table.make(config, rows, context, layers, pdl)
            launches[0]()
            result = out.clone()
            out.fill_(float("nan"))
            launches[0]()
            if index == len(first):
                first.append(result)
            error = (result.float() - first[index].float()).norm() / first[index].float().norm()
            right = bool(error < 1e-2) and torch.equal(result, out)
            seconds = seconds_a_launch(launches)
            rate = moved / seconds / 1e9 if is_decode else operations / seconds / 1e12
            cell = f"{seconds * 1e6:.2f} ({rate:,.0f}){'' if right else ' WRONG'}"
            line += f"{cell:>22}"
            rows_out.append(
                {
                    "table": table.name,
                    "setting": label(config),
                    "pdl": pdl,
                    "rows": rows,
                    "context": context,
                    "us": round(seconds * 1e6, 2),
                    "right": right,
                }
            )
            del out, launches
        print(line, flush=True)
    torch.cuda.empty_cache()
    return rows_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tables whose name contains this")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no table after this")
    parser.add_argument("--compile", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [table for table in tables() if options.only in table.name]
    if options.compile >= 0:
        compile_share(chosen, options.compile)
        return
    began = time.monotonic()
    command = [sys.executable, os.path.abspath(__file__), "--only", options.only, "--compile"]
    compilers = [subprocess.Popen([*command, str(part)]) for part in range(COMPILERS)]
    failed = [part for part, process in enumerate(compilers) if process.wait()]
    print(f"compiled in {time.monotonic() - began:.0f} s", *(f"part {p} failed" for p in failed))
    print("µs a launch (decode: GB/s of keys and values; prefill: TFLOP/s)")
    rows: list[dict[str, object]] = []
    skipped: list[str] = []
    for table in chosen:
        if time.monotonic() - began > options.seconds:
            skipped.append(table.name)
            continue
        rows.extend(measure(table))
    seconds = round(time.monotonic() - began, 1)
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "seconds": seconds, "skipped": skipped, "rows": rows}))


if __name__ == "__main__":
    main()
