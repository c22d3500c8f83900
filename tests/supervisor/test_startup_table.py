"""The table of a start."""

import os

from zlm.process.linux import memory_bytes
from zlm.supervisor.startup_table import MIB, StartupTable


def test_phases_with_their_time_and_memory() -> None:
    table = StartupTable(100.0)
    table.phase("worker", "loading weights", 102.0, 300 * MIB)
    table.ready("frontend", 100.5, 50 * MIB)
    table.phase("worker", "loading weights: 40%", 102.5, 600 * MIB)
    table.phase("worker", "warming up", 103.25, 900 * MIB)
    table.ready("worker", 104.0, 1000 * MIB)
    rows = [line.split() for line in table.lines(104.5)]
    assert rows == [
        ["process", "phase", "seconds", "until", "MiB"],
        ["worker", "starting", "2.00", "2.00", "300"],
        ["loading", "weights", "1.25", "3.25", "900"],
        ["warming", "up", "0.75", "4.00", "1000"],
        ["frontend", "starting", "0.50", "0.50", "50"],
        ["total", "4.50", "4.50", "1050"],
    ]
    assert len({len(line) for line in table.lines(104.5)}) == 1, "columns are aligned"


def test_memory_of_a_process() -> None:
    assert memory_bytes(os.getpid()) > 5 * MIB
    assert memory_bytes(2**22 + 1) == 0
