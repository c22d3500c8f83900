"""How far a download is, from bars that huggingface_hub believes to be tqdm's."""

import pytest

from zlm.weights.download_progress import REPORT_SECONDS, bar_class, share


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_bar_that_is_furthest_is_told_every_few_seconds() -> None:
    told: list[str] = []
    clock = Clock()
    make = bar_class("owner/model", told.append, clock)
    files = make(total=3, desc="Fetching 3 files")
    coming = make(total=0, unit="B", unit_scale=True)
    written = make(total=0, unit="B", unit_scale=True)
    files.update(1)
    assert told == [], "nothing has come in yet"
    coming.total += 4_000_000_000
    written.total += 4_000_000_000
    coming.update(1_000_000)
    written.update(999_000_000)
    assert told == ["downloading owner/model: 0% of 4.0 GB"]
    clock.now += REPORT_SECONDS
    files.update(1)
    assert told[1:] == ["downloading owner/model: 25% of 4.0 GB"]
    clock.now += REPORT_SECONDS - 0.1
    written.update(500_000_000)
    assert len(told) == 2
    for bar in (files, coming, written):
        bar.refresh()
        bar.set_description("done")
        bar.close()


def test_what_was_there_before_counts() -> None:
    told: list[str] = []
    bar = bar_class("m", told.append)(total=2000, initial=1000, unit="B")
    bar.update(500)
    assert told == ["downloading m: 75% of 2.0 kB"]


def test_a_bar_over_things_gives_them_all() -> None:
    assert list(bar_class("m", print)(range(3), total=3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("num_bytes", "total", "words"),
    [
        (0, 0, "0 bytes"),
        (512, 0, "512 bytes"),
        (1_500_000, 0, "1.5 MB"),
        (5, 1000, "0% of 1.0 kB"),
        (1000, 1000, "100% of 1.0 kB"),
        (2_000_000_000, 1000, "2.0 GB"),
    ],
)
def test_share(num_bytes: float, total: float, words: str) -> None:
    assert share(num_bytes, total) == words
