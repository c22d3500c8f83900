"""Ranks as threads of one process: what is exchanged between them is there without a transport."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from zlm.ops.parallel import Parallel

PATIENCE_SECONDS = 60.0
T = TypeVar("T")


class ThreadExchange:
    """See ``zlm.ops.parallel.Exchange``."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(parts)
        self._parts = parts
        self._barrier = barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self._parts[self.rank] = x.clone()
        self._barrier.wait(PATIENCE_SECONDS)
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait(PATIENCE_SECONDS)
        assert len({part.shape for part in parts}) == 1, "ranks are not at the same place"
        return parts

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def adds(self, residual: Tensor) -> bool:
        return residual.shape[0] % 2 == 0  # both ways come in one run

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self.sum(x))

    def gather(self, x: Tensor, columns: int) -> Tensor:
        return torch.cat(self._all(x), 1)[:, :columns].contiguous()


def on_ranks(size: int, body: Callable[[Parallel], T]) -> list[T]:
    """Return what *body* gives on each of *size* ranks."""
    parts: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def work(rank: int) -> T:
        try:
            return body(Parallel(ThreadExchange(rank, parts, barrier)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        waiting = [pool.submit(work, rank) for rank in range(size)]
        errors = [each.exception() for each in waiting]
        for error in sorted(
            (error for error in errors if error is not None),
            key=lambda error: isinstance(error, threading.BrokenBarrierError),
        ):
            raise error
    return [each.result() for each in waiting]
