"""How a process that computes on the CPU is set up. Imports no torch: some of it must come first.

Call ``prepare`` before torch is imported, ``keep_freed_memory`` once the weights are loaded.
"""

import ctypes
import os

# Read by OpenMP and MKL when torch is loaded; a user's own settings stay.
ENVIRONMENT = {
    # How long a compute thread spins at a barrier before it sleeps: about 0.2 ms. GNU OpenMP's own
    # choice is 30 times as much, longer than a slice of the scheduler: where another process wants
    # the core, the spinning thread keeps it from the one that it waits for, and a step of 30 ms
    # takes 1.6 s. To sleep at once costs a quarter of a step's time on an idle machine; this, 3 %.
    "GOMP_SPINCOUNT": "10000",
    # MKL's results do not depend on how an operand lies in memory, hence not on which thread
    # computes a row: greedy answers do not depend on their neighbours. Costs nothing measurable.
    "MKL_CBWR": "AUTO",
    # A product is compiled for each number of rows and takes 0.3 to 0.5 MB; oneDNN and torch keep
    # 1024 each, which prompts of all lengths fill up (0.7 GB for SmolLM2). These keep a quarter: a
    # prompt that finds its products gone costs up to 5 % more time, one in use never does.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "16",
}

LARGEST_KEPT_BYTES = 512 * 1024 * 1024
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def prepare() -> None:
    """Set what the compute libraries read when they are loaded."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> bool:
    """Let the allocator keep freed memory for the next step; return whether it can (glibc).

    By default glibc gives every large buffer back to the system, and the next step pays for its
    pages again: copying 2.5 MB to a fresh buffer took 1.5 ms, to a used one 0.1 ms.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library: it only is slower
    options = (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)
    return all(mallopt(option, LARGEST_KEPT_BYTES) == 1 for option in options)
