"""Which type a CPU computes in, how many threads it uses, and how much memory it has.

``--dtype auto`` on a CPU is decided by what the machine does well, not by the checkpoint: bfloat16
halves the weights that every token reads, but without AVX512-BF16 or AMX its matrix products are
several times slower than float32. So both are timed, on the shapes of this model and on weights
that no cache holds, in about half a second: the products that models use, packed as theirs are.
"""

import logging
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from zlm.config import ModelOptions, ModelSpec
from zlm.errors import ConfigError
from zlm.models.tensors import expected_tensors
from zlm.ops import cpu_linear, cpu_quantized

log = logging.getLogger("zlm.worker")

SPELLINGS = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
ROWS = (1, 8, 128)  # decode alone, decode in company, prefill
LARGEST_SIDE = 2048  # of the timed matrix; larger ones behave alike and cost more time
MEASURE_SECONDS = 0.3
COLD_BYTES = 64 * 1024 * 1024  # of weights, at least: what a step reads is in no cache
WORTH_IT = 1.15  # bfloat16 must be so many times faster to give up float32's precision


def choose(name: str, spec: ModelSpec, *, free_bytes: int) -> torch.dtype:
    """Return the compute type for ``--dtype`` *name* on a CPU.

    Raises ConfigError for float16, which CPUs do not compute in, and for unknown names.
    """
    if name == "auto":
        return _measured(spec, free_bytes)
    if name not in SPELLINGS:
        known = ", ".join(("auto", *SPELLINGS))
        raise ConfigError(f"--dtype {name} is not known; choose one of {known}")
    dtype = SPELLINGS[name]
    if dtype is torch.float16:
        raise ConfigError(
            f"--dtype {name}: CPUs do not compute in float16; use float32, bfloat16 or auto"
        )
    log.info("compute type %s, as --dtype says", str(dtype).removeprefix("torch."))
    return dtype


def keeps_quantized(options: ModelOptions, spec: ModelSpec) -> bool:
    """Tell whether the products of a quantized checkpoint are made of its codes, in bfloat16.

    That is faster where the CPU has VNNI and bfloat16, which is not timed: it was so at every
    number of rows (bench/RESULTS.md). ``--dtype`` asks for products of that type instead;
    ``--quantization`` with the checkpoint's kind asks for the codes, with bfloat16 too.
    """
    is_quantized = spec.quantization is not None or spec.weights_format == "gguf"
    if not is_quantized or spec.pooling is not None or options.load_format == "dummy":
        return False
    dtype = SPELLINGS.get(options.dtype)
    is_wanted = options.dtype == "auto" or (
        dtype is torch.bfloat16 and options.quantization is not None
    )
    has_units = torch.cpu._is_vnni_supported() and torch.cpu._is_avx512_bf16_supported()
    if not (is_wanted and has_units and cpu_quantized.is_usable()):
        return False
    log.info("the weights stay quantized: products of few rows are made of their codes")
    return True


def is_short(spec: ModelSpec, free_bytes: int) -> bool:
    """Tell whether quantized weights and their bfloat16 form would take too much of the memory."""
    both = weight_bytes(spec, 3)  # 2.6 bytes each, and the embedding's codes
    short = both > free_bytes // 2
    if short:
        log.info("weights have no bfloat16 form: %.1f GiB are free", free_bytes / 2**30)
    return short


def weight_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """Return how many bytes the weights of *spec* take."""
    return sum(math.prod(shape) for shape in expected_tensors(spec).values()) * element_bytes


def _measured(spec: ModelSpec, free_bytes: int) -> torch.dtype:
    wide = weight_bytes(spec, 4)
    if wide > free_bytes:
        log.warning(
            "compute type bfloat16: float32 weights would take %.1f GiB of the %.1f GiB free",
            wide / 2**30,
            free_bytes / 2**30,
        )
        return torch.bfloat16
    ratios = speed_ratios(spec.hidden_size, spec.intermediate_size)
    mean = math.prod(ratios.values()) ** (1 / len(ratios))
    slowest = min(ratios.values())
    dtype = torch.bfloat16 if mean >= WORTH_IT and slowest >= 1 / WORTH_IT else torch.float32
    log.info(
        "compute type %s: bfloat16 is %s times as fast as float32 here",
        str(dtype).removeprefix("torch."),
        ", ".join(f"{ratio:.2f} (M={rows})" for rows, ratio in ratios.items()),
    )
    return dtype


@torch.inference_mode()
def speed_ratios(hidden_size: int, intermediate_size: int) -> dict[int, float]:
    """Return, by number of rows, how many times faster a bfloat16 product is than float32's."""
    inner, outer = min(hidden_size, LARGEST_SIDE), min(intermediate_size, LARGEST_SIDE)
    weight = torch.full((outer, inner), 0.01)
    copies = max(1, -(-COLD_BYTES // (2 * weight.numel())))
    wide = [cpu_linear.pack(weight) for _ in range(copies)]
    narrow = [cpu_linear.pack(weight.bfloat16()) for _ in range(copies)]
    share = MEASURE_SECONDS / (2 * len(ROWS))
    ratios = {}
    for rows in ROWS:
        x = torch.full((rows, inner), 0.01)
        ratios[rows] = _seconds(x, wide, share) / _seconds(x.bfloat16(), narrow, share)
    return ratios


def _seconds(x: Tensor, products: list[cpu_linear.Packed], limit: float) -> float:
    """Return the shortest time of all *products*, within about *limit* seconds of trying."""
    products[0](x)
    shortest, end = math.inf, time.perf_counter() + limit
    while True:
        began = time.perf_counter()
        for product in products:
            product(x)
        now = time.perf_counter()
        shortest = min(shortest, now - began)
        if now + shortest > end:
            return shortest


def set_threads(wanted: int | None, ranks: int = 1) -> int:
    """Use *wanted* compute threads, or one a physical core that this process may run on.

    In the latter case *ranks* processes share the cores.
    """
    threads = wanted if wanted is not None else max(1, physical_cores() // ranks)
    if threads < 1:
        raise ConfigError(f"--cpu-threads {threads} is less than 1")
    torch.set_num_threads(threads)
    return threads


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the physical cores among the CPUs this process may run on, at least 1.

    Hyper-threads of a core share its vector units, so a second thread there only gets in the way.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return max(1, len(cores))


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory this process may still take: the machine's or its cgroup's."""
    fields = (root / "proc/meminfo").read_text().split("\n")
    kilobytes = next(int(line.split()[1]) for line in fields if line.startswith("MemAvailable:"))
    free = kilobytes * 1024
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)
