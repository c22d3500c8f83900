"""Sampling on a GPU: every parameter the CPU sampler knows, the same results, and no waiting.

``GpuSampler`` owns the device's sampling parameters by slot, their originals on the host, and the
kernels' working memory. All it does is launched on the current stream and read back by no one but
the runner, so a step can be sent while another runs. What is done, in what order, and what becomes
of rows that cannot be sampled, is as in ``zlm.worker.sampler``:

    logits → adjust: penalties, allowed ids → edit: biases, early ends, bad words
           → masks of grammars
           → draw: temperature, min_p, top_k, top_p, race → tokens, statuses, token table
    logits → report: log-probabilities of the raw distribution, of what was drawn

Rows that only draw (``variant``) need nothing from the host in a step: ``draw`` can be part of a
CUDA graph. ``full`` does the rest too, with client lists from the host when the batch has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.kernels import (
    sampling,
    sampling_adjust,
    sampling_columns,
    sampling_edit,
)
from zlm.messages import Join
from zlm.worker import gpu_sampler_selection
from zlm.worker.gpu_sampler_columns import SlotColumns, upload_all
from zlm.worker.gpu_sampler_report import Report, Reporter
from zlm.worker.gpu_sampler_selection import Selection
from zlm.worker.sampling_slots import NO_LISTS, Ints, SamplingSlots

DRAW, CUT, FULL = 0, 1, 2  # what a slot needs
VARIANTS = ("draw", "cut", None)


@dataclass(frozen=True, slots=True)
class MaskedSamples:
    """Samples that follow a grammar: ``places`` int64 [k] among the step's, ``words`` int32 [k, W].

    W is ceil(V / 32); bit i % 32 of word i // 32 says whether id i may be drawn.
    """

    places: Ints
    words: np.ndarray


class GpuSampler:
    """Owns parameters of ``num_slots`` slots and of the dummy slot after them, and scratch.

    *tokens* int32 [num_slots + 1, L] is the runner's token table. Steps have at most *max_samples*
    sampling rows, padding included. *pdl*: drawing may start before the kernel before it has ended.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        max_samples: int,
        tokens: Tensor,
        device: torch.device,
        *,
        pdl: bool = False,
    ) -> None:
        assert tokens.shape[0] == num_slots + 1, "the token table has a dummy slot"
        self.dummy_slot = num_slots
        self._host = SamplingSlots(num_slots + 1, vocab_size)
        self.num_prompt = self._host.num_prompt
        self.prompt_logprobs = self._host.columns["prompt_logprobs"]
        self._needs = np.zeros(num_slots + 1, np.uint8)
        self._device = device
        self._pdl = pdl
        self._tokens = tokens
        self._columns = SlotColumns(num_slots + 1, vocab_size, device)
        rows = _scratch_rows(max_samples)
        self._scratch = sampling_columns.allocate(rows, vocab_size, device)
        self._reporter = Reporter(rows, vocab_size, device)
        self._selection: tuple[bytes, Selection] | None = None

    # ------------------------------------------------------------------------------ slots

    @torch.inference_mode()
    def join(self, joins: Sequence[Join]) -> None:
        """Write the parameters of sequences that take a slot; whatever stood there is gone.

        Their tokens must be in the token table (or on their way, on this stream).
        """
        slots = self._host.join(joins)
        assert slots.max() < self.dummy_slot, "slot out of range"
        lengths = np.array([len(join.token_ids) // 4 for join in joins], np.int64)
        self._columns.write(self._host, slots, lengths, self._tokens)
        self._needs[slots] = self._needed(slots)
        self._selection = None

    def variant(self, slots: np.ndarray) -> str | None:
        """Return what rows in *slots* need: "draw", "cut", or None for ``full``.

        "cut" is for min_p, top_k and top_p; penalties, client lists and log-probabilities are
        ``full``'s. The most that one of the rows needs counts.
        """
        return VARIANTS[int(self._needs[slots].max(initial=DRAW))]

    def _needed(self, slots: Ints) -> np.ndarray:
        column = {name: values[slots] for name, values in self._host.columns.items()}
        cut = (column["min_p"] > 0) | (column["top_k"] > 0) | (column["top_p"] < 1)
        lists = [self._host.lists[slot] is not NO_LISTS for slot in slots.tolist()]
        full = self._host.penalised(slots) | (column["logprobs"] >= 0) | np.array(lists)
        return np.where(full, FULL, np.where(cut & ~self._host.greedy[slots], CUT, DRAW))

    # ------------------------------------------------------------------------------ steps

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        lengths: Tensor,
        *,
        tokens_out: Tensor,
        status_out: Tensor,
        cut: bool,
    ) -> None:
        """Draw one token for each row of *logits* [S, V] and put it into the token table.

        ``slots`` and ``lengths`` (the position of the drawn token) are int32 [S]; padding rows have
        the dummy slot. ``tokens_out`` int32 [S], ``status_out`` uint8 [S]. For rows whose
        ``variant`` is "draw" or, with *cut*, "cut". A CUDA graph may hold it.
        """
        sampling.sample(
            logits,
            self._columns.drawing,
            slots,
            lengths,
            out=tokens_out,
            status=status_out,
            scratch=self._scratch,
            tokens=self._tokens,
            min_p=cut,
            top_k=cut,
            top_p=cut,
            pdl=self._pdl,
        )

    def full(
        self,
        logits: Tensor,
        slots: Tensor,
        lengths: Tensor,
        slots_host: np.ndarray,
        *,
        tokens_out: Tensor,
        status_out: Tensor,
        masked: MaskedSamples | None = None,
    ) -> Report | None:
        """Do all that the rows ask for; arguments as in ``draw``. Uses up *logits*, float32 [S, V].

        ``slots_host`` int64 [S] is ``slots`` on the host, dummies included. Returns what is to be
        copied out when some row reports; its rows are rows of *logits*.
        """
        selection = self._select(slots_host)
        adjusted = self._adjust(logits, selection, slots, lengths)
        if masked is not None:
            adjusted = self._mask(logits, adjusted, selection, slots, masked)
        columns = self._columns
        sampling.sample(
            adjusted,
            columns.drawing,
            slots,
            lengths,
            out=tokens_out,
            status=status_out,
            scratch=self._scratch,
            tokens=self._tokens,
            count_rows=columns.count_rows,
            counts=columns.counts if selection.penalties else None,
            min_p=selection.min_p,
            top_k=selection.top_k,
            top_p=selection.top_p,
            pdl=self._pdl,
        )
        if selection.reported is None:
            return None
        return self._reporter.report(logits, tokens_out, selection.reported)

    def _select(self, slots: np.ndarray) -> Selection:
        key = slots.tobytes()
        if self._selection is None or self._selection[0] != key:
            selection = gpu_sampler_selection.select(self._host, slots, self._device)
            self._selection = (key, selection)
        return self._selection[1]

    def _adjust(
        self, logits: Tensor, selection: Selection, slots: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return logits with penalties, masks and edits: in place, or a copy if rows report."""
        in_one_pass = selection.penalties or selection.mask_rows is not None
        if not (in_one_pass or selection.edits):
            return logits
        out = logits if selection.reported is None else torch.empty_like(logits)
        columns = self._columns
        if in_one_pass:
            sampling_adjust.adjust(
                logits,
                out=out,
                slots=slots,
                repetition=columns.repetition,
                presence=columns.presence,
                frequency=columns.frequency,
                count_rows=columns.count_rows,
                counts=columns.counts if selection.penalties else None,
                mask_rows=selection.mask_rows,
                mask=None if selection.mask_rows is None else columns.mask,
            )
        elif out is not logits:
            out.copy_(logits)
        if selection.biases is not None:
            sampling_edit.add_bias(out, *selection.biases)
        if selection.early_ends is not None:
            sampling_edit.ban_early_ends(out, *selection.early_ends, lengths)
        if selection.bad_words is not None:
            sampling_edit.ban_words(
                out, *selection.bad_words, slots, columns.num_prompt, lengths, self._tokens
            )
        return out

    def _mask(
        self,
        logits: Tensor,
        adjusted: Tensor,
        selection: Selection,
        slots: Tensor,
        masked: MaskedSamples,
    ) -> Tensor:
        """Return *adjusted* with *masked* applied, as ``_adjust`` does; a NaN stays one."""
        rows = np.full(len(logits), -1, np.int32)
        rows[masked.places] = np.arange(len(masked.places))
        mask_rows, words = upload_all([rows, masked.words.reshape(-1)], self._device)
        keeps = adjusted is logits and selection.reported is not None
        out = torch.empty_like(logits) if keeps else adjusted
        columns = self._columns
        sampling_adjust.adjust(
            adjusted,
            out=out,
            slots=slots,
            repetition=columns.repetition,
            presence=columns.presence,
            frequency=columns.frequency,
            count_rows=columns.count_rows,
            mask_rows=mask_rows,
            mask=words.view(masked.words.shape),
        )
        return out


def _scratch_rows(max_samples: int) -> int:
    """Return the rows of scratch: so many that every part of it is aligned as kernels expect."""
    return -(-max_samples // 16) * 16
