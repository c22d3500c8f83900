"""Count pages: exact, readable by all, and going on where a dead process stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

from zlm.process.counts import CELLS, OVERFLOW, STARTS, CountPage, path_of, read, read_all


def test_a_reader_sees_what_the_owner_counts(tmp_path: Path) -> None:
    path = path_of(tmp_path, "engine", 0)
    page = CountPage(path)
    single, row = page.cells("tokens"), page.cells("gaps", 3)
    single[0] += 2**53 - 1
    row[1] += 0.5
    assert read(path) == page.values()
    assert read(path)["tokens"] == [2.0**53 - 1] and read(path)["gaps"] == [0.0, 0.5, 0.0]
    page.cells("late\twith\tlabels")[0] += 1
    assert read(path)["late\twith\tlabels"] == [1.0]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_successor_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = path_of(tmp_path, "frontend", 1)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from zlm.process.counts import CountPage\n"
        "page = CountPage(Path(sys.argv[1]))\n"
        "page.cells('a')[0] += 3; page.cells('b', 2)[1] += 4\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    page = CountPage(path)
    page.cells("c")[0] += 1
    assert read(path) == {
        OVERFLOW: [0.0], STARTS: [3.0], "a": [6.0], "b": [0.0, 8.0], "c": [1.0],
    }  # fmt: skip


def test_pages_are_found_by_role_and_index(tmp_path: Path) -> None:
    for role, index in (("frontend", 0), ("frontend", 11), ("engine", 0)):
        CountPage(path_of(tmp_path, role, index)).cells("x")[0] = index
    (tmp_path / "heartbeat").write_bytes(b"something else")
    pages = read_all(tmp_path)
    assert {role: sorted(of) for role, of in pages.items()} == {"engine": [0], "frontend": [0, 11]}
    assert pages["frontend"][11]["x"] == [11.0]
    assert read(tmp_path / "counts-none-0") == {}


def test_a_full_page_counts_what_it_cannot_name(tmp_path: Path) -> None:
    page = CountPage(tmp_path / "counts-x-0")
    for number in range(CELLS + 10):
        page.cells(f"entry {number}")[0] += 1
    values = read(tmp_path / "counts-x-0")
    assert sum(cells[0] for cells in values.values()) == CELLS + 10 + 1
    assert values[OVERFLOW][0] >= 10


def test_cells_keep_their_number(tmp_path: Path) -> None:
    CountPage(tmp_path / "counts-x-0").cells("histogram", 4)
    with pytest.raises(ValueError, match="4 cells, not 5"):
        CountPage(tmp_path / "counts-x-0").cells("histogram", 5)


def test_a_page_in_memory_is_one_process_s_own() -> None:
    page = CountPage()
    page.cells("a")[0] += 1
    assert page.values()["a"] == [1.0] and CountPage().values().get("a") is None
