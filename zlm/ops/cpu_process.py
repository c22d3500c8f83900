"""How a process that computes on the CPU is set up. Imports no torch: some of it must come first.

Call ``prepare`` before torch is imported, ``keep_freed_memory`` once the weights are loaded.
"""

import ctypes
import os

# Read by OpenMP and MKL when torch is loaded; a user's own settings stay.
ENVIRONMENT = {
    # Compute threads sleep at a barrier instead of spinning. zlm's other processes and the clients
    # share the cores: a spinning thread holds the core that the one it waits for needs.
    "OMP_WAIT_POLICY": "PASSIVE",
    # MKL's results do not depend on how an operand lies in memory, hence not on which thread
    # computes a row: greedy answers do not depend on their neighbours. Costs nothing measurable.
    "MKL_CBWR": "AUTO",
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
