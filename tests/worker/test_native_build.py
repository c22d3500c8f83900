"""How the CPU's kernels are compiled and kept, and what happens where they cannot be."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from zlm.ops.cpu_native import NativeKernels
from zlm.worker import native_build, startup
from zlm.worker.kernel_cache import FOLDER_VARIABLE


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {FOLDER_VARIABLE: str(folder), "PATH": os.environ["PATH"], **more}


@pytest.fixture(autouse=True)
def compiler() -> str:
    found = native_build.compiler({})
    if found is None:
        pytest.skip("no C compiler")
    return found


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    first = native_build.build(environment(folder))
    assert first is not None and [first] == list(folder.iterdir())
    NativeKernels(first)
    monkeypatch.setattr(native_build, "_compile", None)
    assert native_build.build(environment(folder)) == first


def test_one_that_was_cut_short_is_compiled_again(tmp_path: Path) -> None:
    first = native_build.build(environment(tmp_path))
    assert first is not None
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    assert native_build.build(environment(tmp_path)) == first and first.read_bytes() == whole


def test_workers_that_start_together(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(native_build.build, [environment(tmp_path)] * 4))
    assert built == set(tmp_path.iterdir()) and len(built) == 1


def test_another_machine_or_compiler_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {native_build.build(environment(tmp_path))}
    with monkeypatch.context() as changed:
        changed.setattr(native_build, "_abilities", lambda: b"avx1024")
        built.add(native_build.build(environment(tmp_path)))
    wrapper = tmp_path / "cc"
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 99.0 && exit\nexec gcc "$@"\n')
    wrapper.chmod(0o755)
    built.add(native_build.build(environment(tmp_path, CC=str(wrapper))))
    assert None not in built and len(built) == 3


def test_no_compiler_and_a_broken_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert native_build.build(environment(tmp_path, CC="/no/such/compiler")) is None
    assert "CC=/no/such/compiler is not found" in caplog.text
    wrapper = tmp_path / "cc"
    wrapper.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nprintf "what is -O3\\377" >&2\nexit 1\n'
    )
    wrapper.chmod(0o755)
    caplog.clear()
    assert native_build.build(environment(tmp_path, CC=str(wrapper))) is None
    assert "what is -O3" in caplog.text and list(tmp_path.iterdir()) == [wrapper]


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert native_build.build(environment(tmp_path / "file" / "kernels")) is None
    assert "cannot be compiled" in caplog.text


def test_a_library_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    stranger = next(Path(torch.__file__).parent.glob("lib/libgomp*"))  # without its functions
    for library in (broken, stranger):
        caplog.clear()
        monkeypatch.setattr(native_build, "library", lambda library=library: library)
        assert startup._kernels() is None and "cannot be loaded" in caplog.text


def test_what_killed_compilers_left_is_cleared(tmp_path: Path) -> None:
    old, new = tmp_path / ".zlm-cpu-old", tmp_path / ".zlm-cpu-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "x.o").write_text("")
    os.utime(old, (0, 0))
    built = native_build.build(environment(tmp_path))
    assert set(tmp_path.iterdir()) == {built, new}


def test_its_threads_are_torchs(tmp_path: Path) -> None:
    """One OpenMP in the process: two would have threads that wait for the same cores."""
    library = native_build.build(environment(tmp_path))
    show = "print(open('/proc/self/maps').read())"
    code = f"import torch, ctypes; ctypes.CDLL({str(library)!r}); {show}"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(library) in told.stdout
    files = {line.split()[-1] for line in told.stdout.splitlines() if "libgomp" in line}
    assert len(files) == 1
