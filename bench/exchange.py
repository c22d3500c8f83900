"""How long ranks take to sum and gather over their GPUs: our kernel, and NCCL; and whether both are
right.

    python bench/exchange.py [--ranks 2] [--sizes 8,64,256,512,1024,2048]

Sizes are KiB of bfloat16. Each figure is of a CUDA graph of ``CHAIN`` sums, replayed ``REPLAYS``
times. Prints a JSON line a size: microseconds of one sum (or of one gather of float32 of so many
bytes), and exits with an error if a result is wrong on any rank.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHAIN, REPLAYS = 50, 20
COLUMNS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="8,64,256,512,1024,2048")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        sizes = [int(size) << 10 for size in options.sizes.split(",")]
        be_rank(options.rank, options.ranks, options.meeting, sizes)
        return
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, __file__, *sys.argv[1:], "--meeting", f"{folder}/meeting"]
        processes = [subprocess.Popen([*own, "--rank", str(rank)]) for rank in range(options.ranks)]
        sys.exit(max(abs(process.wait()) for process in processes))


def be_rank(rank: int, size: int, meeting: Path, sizes: list[int]) -> None:
    """Check and time as one of the ranks; the first prints."""
    from zlm.worker import ranks

    ranks.prepare()
    import torch
    import zmq

    from zlm.config import ParallelOptions
    from zlm.worker import gpu_measure, parallel

    device = gpu_measure.open_device(rank)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    group = parallel.join(device, rank, ParallelOptions(tensor_parallel_size=size), meeting)
    ours = group.parallel.exchange
    assert ours is not None
    library = parallel.TorchExchange(rank, size)
    for count in sizes:
        line: dict[str, Any] = {"bytes": count, "ranks": size}
        shape = (max(1, count // 2 // COLUMNS), min(COLUMNS, count // 2))
        for name, exchange in (("ours", ours), ("nccl", library)):
            check(exchange, shape, device)
            x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            line[f"{name}_sum_us"] = timed(lambda e=exchange, x=x: e.sum(x))
            residual = torch.zeros_like(x)
            line[f"{name}_add_us"] = timed(lambda e=exchange, x=x, r=residual: e.add(x, r))
            row = torch.zeros(1, count // 4, device=device)
            columns = size * row.shape[1]
            line[f"{name}_gather_us"] = timed(lambda e=exchange, x=row, n=columns: e.gather(x, n))
        if rank == 0:
            print(json.dumps(line), flush=True)
    parallel.leave(zmq.Context())


def check(exchange: Any, shape: tuple[int, int], device: Any) -> None:
    """Compare sums and gathers of random numbers with what every rank can compute alone."""
    import torch

    def part(rank: int, seed: int, kind: Any) -> Any:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(shape, generator=generator).to(kind).to(device)

    for seed, kind in enumerate((torch.bfloat16, torch.float16, torch.float32) * 3):
        parts = [part(rank, seed, kind) for rank in range(exchange.size)]
        residual = part(exchange.size, seed, kind)
        expected = sum(each.double() for each in parts)
        tolerance = 1e-5 if kind == torch.float32 else 2e-2
        summed = exchange.sum(parts[exchange.rank].clone())
        torch.testing.assert_close(summed.double(), expected, rtol=tolerance, atol=tolerance)
        added = exchange.add(parts[exchange.rank].clone(), residual.clone())
        expected = expected + residual.double()
        torch.testing.assert_close(added.double(), expected, rtol=tolerance, atol=tolerance)
        wide = [each.float() for each in parts]
        columns = exchange.size * shape[1] - 3
        gathered = exchange.gather(wide[exchange.rank], columns)
        assert torch.equal(gathered, torch.cat(wide, 1)[:, :columns]), "gathered wrongly"


def timed(launch: Callable[[], Any]) -> float:
    """Return the microseconds of one *launch* in a graph of many."""
    import torch

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(CHAIN):
        launch()
    graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) / (CHAIN * REPLAYS) * 1e6, 2)


if __name__ == "__main__":
    main()
