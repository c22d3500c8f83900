"""Time of every kernel on the shapes of four models, as a fraction of what the card can do.

    python bench/gpu_kernels.py [--only TEXT] [--seconds 140]

A case is a list of launches over different buffers, together larger than the second-level cache if
that takes no more than ``MOST_LAUNCHES`` of them, so that each finds its data in device memory. All
stand in one CUDA graph, as in serving; the time is the median over replays, a launch. Prints a
table, and one JSON document as the last line.

Rows of the products come from ``gpu_products.CASES``.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gpu_products import CASES, Launch, Work
from torch import Tensor
from zlm.kernels import (
    attention_decode as decode,
    attention_decode_plan as planning,
    attention_prefill as prefill,
    attention_prefill_plan as tiling,
)
from zlm.kernels.rms_norm import rms_norm
from zlm.kernels.rotary_kv import rotary_kv

PEAK_BYTES = 4.2e12  # a second, measured on one H200: a large copy
PEAK_FLOPS = 755e12  # measured there: bfloat16 product of 8192 cubed
COLD_BYTES = 160 * 2**20  # more than twice the second-level cache
MOST_LAUNCHES = 400
MEASURE_SECONDS = 0.02
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
BATCHES = (1, 8, 64, 256)
CONTEXTS = (256, 768, 4096)
PREFILLS = ((1, 512, 512), (4, 2048, 2048), (1, 4096, 4096), (4, 512, 4096))  # rows, new, context


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as far as these kernels see it."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    windows: tuple[int, ...] = (0,)

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize


SHAPES = [
    Shape("smollm2-135m", 576, 9, 3, 64),
    Shape("gemma-3-270m", 640, 4, 1, 256, qk_norm=True, windows=(0, 512)),
    Shape("qwen3-0.6b", 1024, 16, 8, 128, qk_norm=True),
    Shape("llama-3.1-8b", 4096, 32, 8, 128),
]


def copies(launch_bytes: int) -> int:
    """Return how many launches over different buffers keep the cache cold."""
    return max(2, min(MOST_LAUNCHES, -(-COLD_BYTES // max(launch_bytes, 1))))


class Pool:
    """The paged cache of one layer of a shape, filled, and block tables of disjoint blocks."""

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        size = (num_blocks, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim)
        self.cache = torch.empty(size, dtype=DTYPE, device="cuda").normal_()
        self.order = torch.randperm(num_blocks - 1, device="cuda").int() + 1

    def tables(self, lengths: list[int], count: int) -> list[Tensor]:
        """Return *count* block tables of rows of *lengths*; blocks repeat if the pool is small."""
        width = -(-max(lengths) // BLOCK_SIZE)
        needed = len(lengths) * width
        tables = []
        for i in range(count):
            start = i * needed % max(len(self.order) - needed + 1, 1)
            tables.append(self.order[start : start + needed].view(len(lengths), width))
        return tables


def decode_work(shape: Shape, pool: Pool, lengths: list[int], window: int) -> Work:
    """Decode attention of one layer, with the step's plan made."""
    rows, device = len(lengths), torch.device("cuda")
    seen = sum(min(length, window) if window else length for length in lengths)
    heads = shape.num_heads * shape.head_dim
    launch_bytes = seen * shape.token_bytes + 2 * rows * heads * DTYPE.itemsize
    geometry = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    workspace = planning.allocate_workspace(*geometry, DTYPE, device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = torch.empty(planning.plan_size(rows, workspace), dtype=torch.int32, device=device)
    planning.plan_decode(
        seq_lens, out=plan, workspace=workspace, num_kv_heads=shape.num_kv_heads, window=window
    )
    qkv = torch.randn((rows, shape.qkv_width), device=device).to(DTYPE)
    q = qkv[:, :heads].unflatten(1, (shape.num_heads, shape.head_dim))
    out = torch.empty((rows, shape.num_heads, shape.head_dim), dtype=DTYPE, device=device)
    launches = [
        partial(
            decode.attention_decode,
            q,
            pool.cache,
            table,
            seq_lens,
            plan,
            out=out,
            workspace=workspace,
            scale=shape.head_dim**-0.5,
            window=window,
        )
        for table in pool.tables(lengths, copies(launch_bytes))
    ]
    return launches, launch_bytes, 4 * heads * seen


def plan_work(shape: Shape, rows: int) -> Work:
    """The plan of a decode step: once a step and KV group."""
    device = torch.device("cuda")
    geometry = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    workspace = planning.allocate_workspace(*geometry, DTYPE, device)
    seq_lens = torch.randint(1, 4096, (rows,), dtype=torch.int32, device=device)
    plan = torch.empty(planning.plan_size(rows, workspace), dtype=torch.int32, device=device)
    launch = partial(
        planning.plan_decode,
        seq_lens,
        out=plan,
        workspace=workspace,
        num_kv_heads=shape.num_kv_heads,
    )
    return [launch] * 20, 4 * (rows + plan.numel()), 0


def prefill_work(shape: Shape, pool: Pool, chunk: int, context: int, rows: int, win: int) -> Work:
    """Prefill attention of one layer: *rows* chunks that end at *context*."""
    device = torch.device("cuda")
    tokens, heads = rows * chunk, shape.num_heads * shape.head_dim
    seq_lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    starts = torch.arange(0, tokens + 1, chunk, dtype=torch.int32, device=device)
    ends = range(context - chunk + 1, context + 1)
    pairs = rows * sum(min(end, win) if win else end for end in ends)
    geometry = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    per_tile = tiling.tile_queries(*geometry, DTYPE, device)
    items = tiling.num_tiles(tokens, rows, per_tile)
    plan = torch.empty((items, 2), dtype=torch.int32, device=device)
    tiling.plan_prefill(starts, seq_lens, out=plan, queries=per_tile, window=win)
    qkv = torch.randn((tokens, shape.qkv_width), device=device).to(DTYPE)
    q = qkv[:, :heads].unflatten(1, (shape.num_heads, shape.head_dim))
    out = torch.empty((tokens, shape.num_heads, shape.head_dim), dtype=DTYPE, device=device)
    launches = [
        partial(
            prefill.attention_prefill,
            q,
            pool.cache,
            table,
            starts,
            seq_lens,
            plan,
            out=out,
            scale=shape.head_dim**-0.5,
            window=win,
        )
        for table in pool.tables([context] * rows, 2)
    ]
    read = rows * min(context, win + chunk if win else context) * shape.token_bytes
    return launches, read + 2 * tokens * heads * DTYPE.itemsize, 4 * heads * pairs


def norm_work(shape: Shape, rows: int, inner: bool) -> Work:
    """RMSNorm with residual, and with Gemma's inner norm."""
    launch_bytes = 4 * rows * shape.hidden * DTYPE.itemsize + 4 * shape.hidden
    count = copies(launch_bytes)
    x = torch.randn((count, rows, shape.hidden), device="cuda").to(DTYPE)
    residual, out = torch.randn_like(x), torch.empty_like(x)
    weight = torch.randn(shape.hidden, device="cuda")
    launches = [
        partial(
            rms_norm,
            x[i],
            weight,
            1e-6,
            out=out[i],
            residual=residual[i],
            residual_out=residual[i],
            inner_weight=weight if inner else None,
        )
        for i in range(count)
    ]
    return launches, launch_bytes, 0


def rotary_work(shape: Shape, pool: Pool, rows: int) -> Work:
    """Norm of q and k, rotation, cache write; q in place."""
    heads = shape.num_heads * shape.head_dim
    launch_bytes = 2 * rows * shape.qkv_width * DTYPE.itemsize
    count = copies(launch_bytes)
    qkv = torch.randn((count, rows, shape.qkv_width), device="cuda").to(DTYPE)
    angles = torch.rand((8192, shape.head_dim // 2), device="cuda")
    table = torch.polar(torch.ones_like(angles), angles)
    positions = torch.randint(8192, (count, rows), device="cuda")
    num_slots = (pool.cache.shape[0] - 1) * BLOCK_SIZE
    slots = torch.randperm(num_slots, device="cuda")[:rows] + BLOCK_SIZE
    weight = torch.randn(shape.head_dim, device="cuda") if shape.qk_norm else None
    launches = [
        partial(
            rotary_kv,
            qkv[i],
            positions[i],
            slots,
            table,
            pool.cache,
            q_out=qkv[i, :, :heads].unflatten(1, (shape.num_heads, shape.head_dim)),
            q_weight=weight,
            k_weight=weight,
        )
        for i in range(count)
    ]
    return launches, launch_bytes, 0


def shape_cases(shape: Shape) -> Iterator[tuple[str, Callable[[], Work]]]:
    """Yield the rows of one shape; the pool of its cache lives as long as the iteration."""
    pool = Pool(shape, 1 + BATCHES[-1] * CONTEXTS[-1] // BLOCK_SIZE)
    for window in shape.windows:
        kind = f"decode w{window}" if window else "decode"
        for batch in BATCHES:
            for context in CONTEXTS:
                name = f"{shape.name} {kind} b{batch} c{context}"
                yield name, partial(decode_work, shape, pool, [context] * batch, window)
        ragged = [32_768] + [768] * 31
        yield f"{shape.name} {kind} 1x32k+31x768", partial(decode_work, shape, pool, ragged, window)
        kind = kind.replace("decode", "prefill")
        for rows, chunk, context in PREFILLS:
            name = f"{shape.name} {kind} {rows}x{chunk} of {context}"
            yield name, partial(prefill_work, shape, pool, chunk, context, rows, window)
    yield f"{shape.name} decode plan b256", partial(plan_work, shape, 256)
    for rows in (*BATCHES, 4096):
        yield f"{shape.name} norm+residual b{rows}", partial(norm_work, shape, rows, False)
        if len(shape.windows) > 1:
            yield f"{shape.name} norm+residual+norm b{rows}", partial(norm_work, shape, rows, True)
        yield f"{shape.name} rotary+kv b{rows}", partial(rotary_work, shape, pool, rows)


def all_cases() -> Iterator[tuple[str, Callable[[], Work]]]:
    for shape in SHAPES:
        yield from shape_cases(shape)
        torch.cuda.empty_cache()
    yield from CASES.items()


def seconds_a_launch(launches: list[Launch]) -> float:
    """Return the median time of one launch in a graph of all."""
    for launch in launches:  # compiles what is not compiled yet
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times: list[float] = []
    graph.replay()
    while len(times) < 5 or (sum(times) < MEASURE_SECONDS and len(times) < 30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--seconds", type=float, default=140.0, help="start no row after this")
    options = parser.parse_args()
    began, rows, skipped = time.monotonic(), [], []
    print(f"{'':<48}{'µs':>9}{'GB/s':>8}{'of peak':>8}{'TFLOP/s':>9}{'of peak':>8}")
    for name, prepare in all_cases():
        if options.only not in name:
            continue
        if time.monotonic() - began > options.seconds:
            skipped.append(name)
            continue
        launches, launch_bytes, operations = prepare()
        seconds = seconds_a_launch(launches)
        bandwidth, rate = launch_bytes / seconds, operations / seconds
        line = f"{name:<48}{seconds * 1e6:9.2f}{bandwidth / 1e9:8.0f}{bandwidth / PEAK_BYTES:8.1%}"
        line += f"{rate / 1e12:9.1f}{rate / PEAK_FLOPS:8.1%}" if operations else ""
        print(line, flush=True)
        rows.append(
            {
                "name": name,
                "us": round(seconds * 1e6, 3),
                "gb_s": round(bandwidth / 1e9, 1),
                "of_bandwidth": round(bandwidth / PEAK_BYTES, 4),
                "tflop_s": round(rate / 1e12, 2),
            }
        )
    summary = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "peak_gb_s": PEAK_BYTES / 1e9,
        "peak_tflop_s": PEAK_FLOPS / 1e12,
        "seconds": round(time.monotonic() - began, 1),
        "skipped": skipped,
        "rows": rows,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
