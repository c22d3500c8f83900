"""News of sequences, gathered while a message is handled, and split into one message an owner.

Owns nothing that outlives the handling of one message. Rows are columns from the start: a step of
256 decoding sequences is three arrays, never 256 objects.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from zlm.errors import ZlmError
from zlm.messages import (
    OWNER_SHIFT,
    LogprobColumns,
    PooledColumns,
    SequenceError,
    StepOutput,
    Submit,
)

NO_TOKEN = -1

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def renumber(
    columns: LogprobColumns, to: npt.NDArray[Any], keep: npt.NDArray[np.bool_] | None = None
) -> LogprobColumns | None:
    """Return *columns* with row r called ``to[r]``, without rows that go to -1 or are not *keep*.

    *keep* has one entry a described token. None if nothing is left.
    """
    rows = to[np.frombuffer(columns.rows, np.int32)]
    chosen = rows >= 0
    if keep is not None:
        chosen &= keep
    if not chosen.any():
        return None
    rows = rows.astype(np.int32)
    if chosen.all():
        return LogprobColumns(
            rows.tobytes(), columns.counts, columns.ranks, columns.ids, columns.values
        )
    counts = np.frombuffer(columns.counts, np.int32)
    entries = np.repeat(chosen, counts)
    return LogprobColumns(
        rows=rows[chosen].tobytes(),
        counts=counts[chosen].tobytes(),
        ranks=np.frombuffer(columns.ranks, np.int32)[chosen].tobytes(),
        ids=np.frombuffer(columns.ids, np.int32)[entries].tobytes(),
        values=np.frombuffer(columns.values, np.float32)[entries].tobytes(),
    )


def chosen_vectors(columns: PooledColumns, to: npt.NDArray[Any]) -> PooledColumns | None:
    """Return *columns* with row r called ``to[r]``, without rows that go to -1; None if none is."""
    rows = to[np.frombuffer(columns.rows, np.int32)]
    chosen = rows >= 0
    if not chosen.any():
        return None
    numbers, values = rows[chosen].astype(np.int32), np.frombuffer(columns.values, np.float32)
    if not columns.sizes:
        values = values.reshape(-1, columns.width)[chosen]
        return PooledColumns(numbers.tobytes(), columns.width, values.tobytes())
    sizes = np.frombuffer(columns.sizes, np.int32)
    values = values[np.repeat(chosen, sizes)]
    kept = sizes[chosen].tobytes()
    return PooledColumns(numbers.tobytes(), columns.width, values.tobytes(), kept)


def vectors_of(columns: PooledColumns) -> list[npt.NDArray[np.float32]]:
    """Return the elements of each row of *columns*, float32 [its size]."""
    values = np.frombuffer(columns.values, np.float32)
    if not columns.sizes:
        return list(values.reshape(-1, columns.width))
    return np.split(values, np.cumsum(np.frombuffer(columns.sizes, np.int32))[:-1])


class News:
    """Rows, errors and log-probabilities to be told."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.cached: list[tuple[int, int]] = []  # (row, prompt tokens found in the cache)
        self.times: list[tuple[int, float, float]] = []  # (row, when it got room, first token)
        self.errors: list[SequenceError] = []
        self.logprobs: LogprobColumns | None = None  # of these rows
        self.prompt_logprobs: LogprobColumns | None = None
        self.pooled: PooledColumns | None = None
        self._seq_ids: list[Int64s] = []
        self._token_ids: list[Int32s] = []
        self._finish: list[npt.NDArray[np.uint8]] = []

    def add(self, seq_ids: Int64s, token_ids: Int32s, finish: npt.NDArray[np.uint8]) -> None:
        """Add rows, one an entry of the three columns."""
        self.num_rows += len(seq_ids)
        self._seq_ids.append(seq_ids)
        self._token_ids.append(token_ids)
        self._finish.append(finish)

    def add_row(self, seq_id: int, token_id: int, finish: int) -> int:
        """Add one row and return its number."""
        self.add(
            np.array([seq_id], np.int64),
            np.array([token_id], np.int32),
            np.array([finish], np.uint8),
        )
        return self.num_rows - 1

    def add_error(self, seq_id: int, error: ZlmError) -> None:
        """Say that *seq_id* ended in *error*."""
        self.errors.append(
            SequenceError(
                seq_id,
                error.status,
                error.type,
                error.message,
                error.code,
                error.retry_after_seconds,
            )
        )

    def outputs(self) -> list[tuple[int, StepOutput]]:
        """Return (owner, message) for every owner there is news for."""
        if not self.num_rows and not self.errors:
            return []
        seq_ids = _joined(self._seq_ids, np.int64)
        token_ids = _joined(self._token_ids, np.int32)
        finish = _joined(self._finish, np.uint8)
        owners = seq_ids >> OWNER_SHIFT
        present = {error.seq_id >> OWNER_SHIFT for error in self.errors}
        if self.num_rows and (owners == owners[0]).all():
            present.add(int(owners[0]))
        else:
            present.update(owners.tolist())
        if len(present) == 1:
            output = StepOutput(
                seq_ids=seq_ids.tobytes(),
                token_ids=token_ids.tobytes(),
                finish=finish.tobytes(),
                cached=self.cached,
                logprobs=self.logprobs,
                prompt_logprobs=self.prompt_logprobs,
                errors=self.errors,
                pooled=self.pooled,
                times=self.times,
            )
            return [(present.pop(), output)]
        split = []
        for owner in sorted(present):
            rows = np.flatnonzero(owners == owner)
            number = np.full(self.num_rows, -1, np.int64)
            number[rows] = np.arange(len(rows))
            output = StepOutput(
                seq_ids=seq_ids[rows].tobytes(),
                token_ids=token_ids[rows].tobytes(),
                finish=finish[rows].tobytes(),
                cached=[(int(number[row]), n) for row, n in self.cached if number[row] >= 0],
                logprobs=self.logprobs and renumber(self.logprobs, number),
                prompt_logprobs=self.prompt_logprobs and renumber(self.prompt_logprobs, number),
                errors=[e for e in self.errors if e.seq_id >> OWNER_SHIFT == owner],
                pooled=self.pooled and chosen_vectors(self.pooled, number),
                times=[
                    (int(number[row]), start, at)
                    for row, start, at in self.times
                    if number[row] >= 0
                ],
            )
            split.append((owner, output))
        return split


def refused(submit: Submit, error: ZlmError) -> News:
    """Return the news that every sequence of *submit* ended in *error*."""
    news = News()
    for sample in range(max(1, submit.n)):
        news.add_error(submit.seq_id + sample, error)
    return news


def _joined(parts: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
