"""Set-up of a compute process: it happens before torch is there and respects the user."""

import subprocess
import sys

import pytest

from zlm.ops import cpu_process


def test_prepare_imports_no_torch() -> None:
    code = (
        "import sys; from zlm.ops.cpu_process import prepare; prepare(); "
        "assert 'torch' not in sys.modules; import os; print(os.environ['MKL_CBWR'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "AUTO"


def test_prepare_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    cpu_process.prepare()
    assert cpu_process.os.environ["GOMP_SPINCOUNT"] == "7"
    assert cpu_process.os.environ["MKL_CBWR"] == "AVX2"


def test_keep_freed_memory() -> None:
    """In a process of its own: with glibc, a large buffer freed is the next one handed out."""
    code = (
        "from zlm.ops.cpu_process import keep_freed_memory\n"
        "import ctypes\n"
        "c = ctypes.CDLL(None)\n"
        "c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]\n"
        "c.free.argtypes = [ctypes.c_void_p]\n"
        "if keep_freed_memory():\n"
        "    first = c.malloc(64 << 20)\n"
        "    c.free(first)\n"
        "    assert c.malloc(64 << 20) == first\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
