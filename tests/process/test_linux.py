"""What the kernel tells of memory and its want."""

import os
from pathlib import Path

from zlm.process.linux import memory_bytes, oom_kills


def test_memory() -> None:
    assert memory_bytes(os.getpid()) > 2**20
    assert memory_bytes(2**22 + 1) == 0, "no process has such an id"


def test_kills_for_want_of_memory_are_counted_by_the_kernel() -> None:
    lines = Path("/proc/vmstat").read_text().splitlines()
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    assert oom_kills() >= max(counts, default=0)
