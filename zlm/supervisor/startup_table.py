"""The table of a start: what each process did, how long it took, and the memory it then had.

Pure: moments and sizes come in, lines of text go out. A process's phases are what it has told by
Progress; the time before the first is its own start (imports), the last ends when it is ready.
"""

from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
STARTING = "starting"


@dataclass(slots=True)
class _Process:
    """One process: the phase that it is in, and those that it is done with."""

    began: float  # of the phase, seconds
    phase: str = STARTING
    done: list[tuple[str, float, float, int]] = field(default_factory=list)  # name, from, to, bytes

    def enter(self, phase: str, now: float, memory: int) -> None:
        self.done.append((self.phase, self.began, now, memory))
        self.phase, self.began = phase, now


class StartupTable:
    """Collects the phases of a start that began at *began*."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._processes: dict[str, _Process] = {}

    def phase(self, process: str, text: str, now: float, memory: int) -> None:
        """Note that *process*, of *memory* bytes, begins the phase *text*.

        What follows a colon says how far the phase is, and begins none.
        """
        name, entry = text.partition(":")[0], self._of(process)
        if name != entry.phase:
            entry.enter(name, now, memory)

    def ready(self, process: str, now: float, memory: int) -> None:
        """Note that *process*, of *memory* bytes, has ended its last phase."""
        self._of(process).enter("", now, memory)

    def facts(self, now: float) -> dict[str, Any]:
        """Return what the table tells of a server that is ready *now*, as values.

        A phase is its process, its name, when it began and ended in seconds after the start, and
        the bytes that the process then had.
        """
        began = self._began
        phases = [
            (name, phase, round(start - began, 3), round(end - began, 3), memory)
            for name, process in self._processes.items()
            for phase, start, end, memory in process.done
        ]
        return {"seconds": round(now - began, 3), "phases": phases}

    def lines(self, now: float) -> list[str]:
        """Return the table, for a server that is ready *now*."""
        head = f"{'process':<14}{'phase':<30}{'seconds':>9}{'until':>9}{'MiB':>8}"
        lines = [head]
        total = 0
        for name, process in self._processes.items():
            shown = name
            for phase, began, ended, memory in process.done:
                times = f"{ended - began:>9.2f}{ended - self._began:>9.2f}"
                lines.append(f"{shown:<14}{phase:<30}{times}{memory / MIB:>8.0f}")
                shown = ""
            total += process.done[-1][3]
        seconds = now - self._began
        lines.append(f"{'total':<44}{seconds:>9.2f}{seconds:>9.2f}{total / MIB:>8.0f}")
        return lines

    def _of(self, process: str) -> _Process:
        return self._processes.setdefault(process, _Process(self._began))
