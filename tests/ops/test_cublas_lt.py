"""Which candidate of cuBLASLt is launched, with a library that says what it was asked.

What the products come to is tested on a GPU: tests/gpu/test_cublas_lt.py.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zlm.ops import cublas_lt
from zlm.ops.cublas_lt import Choice, Tuned

# tile, custom option, cluster, bytes of workspace, status: best first
CANDIDATES = [(24, 7, 5, 0, 0), (201, 2, 5, 0, 7), (201, 2, 5, 32, 0), (201, 2, 5, 0, 0)]
FIELDS = {1: 0, 5: 1, 8: 2}
STREAM = 77


class FakeLibrary:
    """Answers as cuBLASLt does, with ``CANDIDATES`` for every product."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.status = 0

    def cublasLtCreate(self, handle: Any) -> int:
        handle._obj.value = 1
        return 0

    def cublasLtMatmulDescCreate(self, product: Any, compute: int, scale: int) -> int:
        product._obj.value = 2
        return 0

    def cublasLtMatmulDescSetAttribute(self, *_: Any) -> int:
        return 0

    def cublasLtMatrixLayoutCreate(self, layout: Any, kind: int, *sizes: Any) -> int:
        layout._obj.value = 100 + len(self.layouts)
        self.layouts[layout._obj.value] = tuple(size.value for size in sizes)
        return 0

    def cublasLtMatmulPreferenceCreate(self, preference: Any) -> int:
        preference._obj.value = 3
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, *_: Any) -> int:
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> int:
        most, found, count = given[7:]
        assert most >= len(CANDIDATES)
        for number, (*_, workspace, state) in enumerate(CANDIDATES):
            found[number].algorithm[0] = number
            found[number].workspace_bytes, found[number].state = workspace, state
        count._obj.value = len(CANDIDATES)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, algorithm: Any, attribute: int, value: Any, size: Any, written: Any
    ) -> int:
        value._obj.value = CANDIDATES[algorithm[0]][FIELDS[attribute]]
        return 0

    def cublasLtMatmul(self, *given: Any) -> int:
        weight, of_weight, x, of_x, beta = given[3:8]
        self.launched.append(
            {
                "candidate": given[12][0],
                "operands": (weight.value, x.value, given[10].value),
                "layouts": [self.layouts[each.value] for each in (of_weight, of_x, given[11])],
                "beta": ctypes.c_float.from_buffer(beta._obj).value,
                "stream": given[15].value,
            }
        )
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake = FakeLibrary()
    monkeypatch.setattr(cublas_lt, "_library", lambda: fake)
    cublas_lt._prepared.cache_clear()
    cublas_lt._handle.cache_clear()

    class Stream:
        cuda_stream = STREAM

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    yield fake
    cublas_lt._prepared.cache_clear()
    cublas_lt._handle.cache_clear()


def test_the_chosen_candidate_is_launched(library: FakeLibrary) -> None:
    """Not one that would need a workspace, nor one that the library cannot do."""
    launch = cublas_lt._prepared(8, 6, 4, Choice(201, 2, 5))
    assert launch is not None
    weight, x, out = torch.zeros(6, 4), torch.zeros(8, 4), torch.zeros(8, 6)
    launch(weight, x, out)
    launch(weight, x, out, adds=True)
    first, second = library.launched
    assert first["candidate"] == 3
    assert first["operands"] == (weight.data_ptr(), x.data_ptr(), out.data_ptr())
    assert first["layouts"] == [(4, 6, 4), (4, 8, 4), (6, 8, 6)]  # rows, columns, between columns
    assert (first["beta"], second["beta"]) == (0.0, 1.0)
    assert first["stream"] == STREAM


def test_without_the_candidate_or_the_library_nothing_is_launched(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cublas_lt._prepared(8, 6, 4, Choice(201, 3, 5)) is None
    monkeypatch.setattr(cublas_lt, "_library", lambda: None)
    cublas_lt._prepared.cache_clear()
    assert cublas_lt._prepared(8, 6, 4, Choice(201, 2, 5)) is None


def test_a_failure_is_told(library: FakeLibrary) -> None:
    launch = cublas_lt._prepared(8, 6, 4, Choice(24, 7, 5))
    assert launch is not None
    library.status = 13
    with pytest.raises(RuntimeError, match="cuBLASLt failed with status 13"):
        launch(torch.zeros(6, 4), torch.zeros(8, 4), torch.zeros(8, 6))


def test_rows_choose(library: FakeLibrary) -> None:
    weight = torch.zeros(6, 4)
    tuned = Tuned(weight)
    assert tuned.find(torch.zeros(8, 4)) is None  # nothing was measured on a CPU
    tuned._choices = ((range(5, 8), Choice(1, 1, 1)), (range(8, 17), Choice(201, 2, 5)))
    assert tuned.find(torch.zeros(8, 4)) is not None
    assert tuned.find(torch.zeros(16, 4)) is not None
    assert tuned.find(torch.zeros(7, 4)) is None  # the library has no such candidate
    assert tuned.find(torch.zeros(17, 4)) is None
    assert tuned.find(torch.zeros(8, 8)[:, ::2]) is None
    assert tuned.find(torch.zeros(8, 4, dtype=torch.float64)) is None


def test_a_library_that_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    cublas_lt._library.cache_clear()
    assert cublas_lt._library() is None
    cublas_lt._library.cache_clear()
