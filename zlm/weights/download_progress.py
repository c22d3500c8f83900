"""How far a download is, in words: for logs and service managers, which want lines, not bars.

huggingface_hub shows progress through a class of bars that it is given. It makes several, for
files, for bytes that come in, for bytes that are written. ``bar_class`` makes such a class that
draws nothing and speaks for the bar that is furthest. Knows nothing of hubs.
"""

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

REPORT_SECONDS = 10.0  # between two lines
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

Report = Callable[[str], None]


def bar_class(name: str, report: Report, clock: Callable[[], float] = time.monotonic) -> type[Any]:
    """Return a class of tqdm's kind whose bars tell *report* how many bytes of *name* are there.

    *report* is called by whatever thread downloads, first when bytes come in and then at most
    every REPORT_SECONDS.
    """
    byte_bars: list[Any] = []
    next_report = 0.0

    class Bar(tqdm):  # type: ignore[misc]
        """Counts, although it is disabled, which for tqdm means that it does not."""

        def __init__(self, *values: Any, **keywords: Any) -> None:
            super().__init__(*values, **{**keywords, "disable": True})
            self.n = keywords.get("initial", 0)
            if keywords.get("unit") == "B":
                byte_bars.append(self)

        def update(self, n: float | None = 1) -> None:
            nonlocal next_report
            self.n += n or 0
            now = clock()
            if now < next_report or not any(bar.n for bar in byte_bars):
                return
            next_report = now + REPORT_SECONDS
            furthest = max(byte_bars, key=lambda bar: bar.n)
            report(f"downloading {name}: {share(furthest.n, furthest.total or 0)}")

    return Bar


def share(num_bytes: float, total: float) -> str:
    """Return how much *num_bytes* of *total* is; a *total* of 0 is not known."""
    if total == 0 or total < num_bytes:
        return size(num_bytes)
    return f"{100 * num_bytes / total:.0f}% of {size(total)}"


def size(num_bytes: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    for factor, unit in UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
