"""Log-probabilities of sampled tokens: computed on the device, made into columns on the host.

``Reporter.report`` launches and waits for nothing; what it computed is one tensor, which the runner
copies to the host behind the step. ``Report.columns`` makes of the copy what
``zlm.worker.logprobs`` would have made of the same logits.

A report of E tokens with n alternatives is a flat int32 tensor, every part begun at 16 bytes:

    tokens [E] | ranks [E] | own values [E] (float32 bits) | ids [E, n] | values [E, n] (float32)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.kernels import sampling_logprobs
from zlm.kernels.sampling_logprobs import Scratch
from zlm.messages import LogprobColumns
from zlm.worker import logprobs
from zlm.worker.gpu_sampler_selection import ReportedRows

SIZES = (1, 8, sampling_logprobs.MOST)  # alternatives that the kernels are compiled for
WIDE_BYTES = 16 * 2**20  # logits of rows with more than that are handled in pieces of this size
ALIGNMENT = 4  # integers


@dataclass(frozen=True, slots=True)
class Report:
    """What was computed for the rows of a step that report: ``tensors`` are to be copied out."""

    tensors: tuple[Tensor, ...]
    rows: np.ndarray  # int64 [E]: of the step's samples
    counts: np.ndarray  # int64 [E]: entries each, itself included
    width: int  # n

    def columns(self, copies: Sequence[Tensor], places: np.ndarray | None = None) -> LogprobColumns:
        """Return the columns, given the host's *copies* of ``tensors``.

        *places* int64 [k], where the step's samples stood among padding, tells which sample a row
        is: row ``places[i]`` is reported as i, in the order of i. None: rows are as they were.
        """
        parts = _parts(copies[0], len(self.rows), self.width)
        tokens, ranks, own, ids, values = (part.numpy() for part in parts)
        rows, order = self.rows, np.arange(len(self.rows))
        if places is not None:
            sample_of = np.zeros(int(places.max(initial=0)) + 1, np.int64)
            sample_of[places] = np.arange(len(places))
            rows = sample_of[rows]
            order = np.argsort(rows, kind="stable")
        columns = (rows, self.counts, tokens, ranks, own, ids, values)
        return logprobs.pack(*(column[order] for column in columns))


class Reporter:
    """Owns the scratch of reports of up to *num_rows* rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        largest = sampling_logprobs.allocate(num_rows, vocab_size, SIZES[-1], device)
        self._scratch = {size: _narrowed(largest, size) for size in SIZES}
        self._vocab_size = vocab_size

    def report(self, logits: Tensor, tokens: Tensor, reported: ReportedRows) -> Report:
        """Describe *tokens* (int32 [R]) of *logits* float32 [R, V], for the rows that report.

        *logits* are the model's own and are left alone.
        """
        entries, most = len(reported.rows), int(reported.counts.max()) - 1
        size = next((size for size in SIZES if most <= size), most)
        width = min(size, self._vocab_size)
        flat = torch.empty(_length(entries, width), dtype=torch.int32, device=logits.device)
        parts = _parts(flat, entries, width)
        torch.index_select(tokens, 0, reported.entries, out=parts[0])
        if size > SIZES[-1]:
            _describe_wide(logits, reported.entries, *parts)
        else:
            _, ranks, own, ids, values = parts
            sampling_logprobs.top_logprobs(
                logits,
                reported.entries,
                tokens,
                own=own,
                ranks=ranks,
                top_ids=ids,
                top_values=values,
                scratch=self._scratch[size],
            )
        return Report((flat,), reported.rows, reported.counts, width)


def _describe_wide(
    logits: Tensor, rows: Tensor, tokens: Tensor, ranks: Tensor, own: Tensor, ids: Tensor,
    values: Tensor,
) -> None:  # fmt: skip
    """Fill in a report with more alternatives than the kernels keep."""
    piece_rows = max(1, WIDE_BYTES // (4 * logits.shape[1]))
    for start in range(0, len(rows), piece_rows):
        piece = slice(start, start + piece_rows)
        raw = torch.log_softmax(logits.index_select(0, rows[piece]), dim=-1)
        described = logprobs.describe(raw, tokens[piece].long(), ids.shape[1])
        for part, found in zip((own, ranks, ids, values), described, strict=True):
            part[piece] = found


def _narrowed(scratch: Scratch, size: int) -> Scratch:
    """Return *scratch* as one for *size* alternatives, in the same memory."""
    rows, chunks, _ = scratch.values.shape
    count = rows * chunks * size
    return Scratch(
        scratch.peak,
        scratch.total,
        scratch.above,
        scratch.values.view(-1)[:count].view(rows, chunks, size),
        scratch.ids.view(-1)[:count].view(rows, chunks, size),
    )


def _offsets(entries: int, width: int) -> list[int]:
    sizes = (entries, entries, entries, entries * width, entries * width)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


def _length(entries: int, width: int) -> int:
    return _offsets(entries, width)[-1]


def _parts(flat: Tensor, entries: int, width: int) -> tuple[Tensor, ...]:
    """Return views of the parts of a report."""
    at, real = _offsets(entries, width), torch.float32
    tokens, ranks, own = (flat[start : start + entries] for start in at[:3])
    ids, values = (flat[start : start + entries * width].view(entries, width) for start in at[3:5])
    return tokens, ranks, own.view(real), ids, values.view(real)
