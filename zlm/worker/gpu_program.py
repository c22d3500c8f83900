"""What a step launches: from its array on the device to samples, in one stretch without the host.

``StepProgram`` owns the fixed buffers that a CUDA graph reads and writes, and ``launch`` is what a
graph holds: prepare → model → logits → sample. The forms of a step:

    draw, cut     sampling is part of it (cut: some row has top_k, top_p or min_p)
    logits        ends with logits: rows with penalties, masks or log-probabilities follow
    silent        no row samples

A step of decodes alone leaves its array ready for the next step of the same rows.
"""

import numpy as np
import torch
from torch import Tensor

from zlm.kernels import step_state
from zlm.models.registry import Model
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.worker import gpu_steps
from zlm.worker.gpu_copy import upload_into
from zlm.worker.gpu_sampler import GpuSampler
from zlm.worker.gpu_steps import StepInputs, StepShape, StepSizes
from zlm.worker.gpu_tables import GpuTables

SAMPLE_ALIGNMENT = 16  # bytes: statuses begin so, else sampling would be compiled for them anew

HostLengths = tuple[list[int], list[int]]  # tokens and context of each row, for ops that need them


class StepProgram:
    """Owns the step's array, its logits and its samples on the device."""

    def __init__(
        self,
        model: Model,
        caches: list[Tensor],
        tables: GpuTables,
        sampler: GpuSampler,
        windows: list[int],
        *,
        vocab_size: int,
        sizes: StepSizes,
        max_num_batched_tokens: int,
        pdl: bool,
        samples: bool = True,
    ) -> None:
        """*pdl*: kernels may start before the one before has ended (``zlm.kernels.chain``).

        samples: False in a stage before the last, where every form is ``silent``.
        """
        self._has_logits = samples
        self._pdl = pdl
        self._model = model
        self._caches = caches
        self._tables = tables
        self._sampler = sampler
        self._windows = windows
        self._device = device = tables.tokens.device
        largest = gpu_steps.length(sizes.largest(max_num_batched_tokens))
        self._array = torch.zeros(largest, dtype=torch.int32, device=device)
        self._samples = torch.zeros(sizes.max_samples * 5, dtype=torch.uint8, device=device)
        self._logits = torch.zeros(sizes.max_samples, vocab_size, device=device)

    def load(self, array: np.ndarray) -> None:
        """Copy a step's array (``gpu_steps.fill``) to the device."""
        upload_into(array, self._array[: len(array)])

    def inputs(self, shape: StepShape) -> StepInputs:
        """Return the parts of the step's array."""
        return gpu_steps.views(self._array, shape)

    def logits(self, count: int) -> Tensor:
        """Return the logits of a step of form ``logits``, float32 [count, V]."""
        return self._logits[:count]

    def samples(self, count: int) -> Tensor:
        """Return a step's samples, uint8: int32 tokens, and statuses from ``statuses_at``."""
        return self._samples[: statuses_at(count) + count]

    def outputs(self, count: int) -> tuple[Tensor, Tensor]:
        """Return where samples go: tokens int32 [count] and statuses uint8 [count]."""
        start = statuses_at(count)
        tokens = self._samples[: 4 * count].view(torch.int32)
        return tokens, self._samples[start : start + count]

    def launch(
        self,
        shape: StepShape,
        form: str,
        lengths: HostLengths = ([], []),
        *,
        all_tokens: bool = False,
    ) -> Tensor:
        """Launch the step whose array was loaded.

        Returns the hidden states of all its tokens if *all_tokens*, of the sampled ones if not.
        """
        inputs = self.inputs(shape)
        picked = None
        if self._has_logits and shape.prefill_rows and not all_tokens:
            # Some token must go on to the end: the first stands for none, whatever comes of it.
            picked = inputs.query_starts[:1] if form == "silent" else inputs.sample_tokens
        batch = self._batch(inputs, shape, lengths, picked)
        hidden = self._model.forward(batch, self._caches)
        if form == "silent" or not self._has_logits:
            return hidden
        sampled, positions = hidden, batch.seq_lens
        if shape.prefill_rows:
            positions = inputs.sample_lengths
            if picked is None:
                sampled = hidden.index_select(0, inputs.sample_tokens)
        logits = self._model.logits(sampled)
        if form == "logits":
            self.logits(shape.samples).copy_(logits)
            return hidden
        tokens, status = self.outputs(shape.samples)
        self._sampler.draw(
            logits,
            inputs.sample_slots,
            positions,
            tokens_out=tokens,
            status_out=status,
            cut=form == "cut",
        )
        return hidden

    def _batch(
        self, inputs: StepInputs, shape: StepShape, lengths: HostLengths, picked: Tensor | None
    ) -> StepBatch:
        tables, device = self._tables, self._device
        rows, num_tokens = shape.num_rows, shape.num_tokens
        # The tail row holds the padding of the prefill part: without one there is none.
        listed = rows + 1 if shape.prefill_rows else rows
        groups, _, width = tables.blocks.shape
        token_ids = torch.empty(num_tokens, dtype=torch.int64, device=device)
        positions = torch.empty_like(token_ids)
        seq_lens = torch.empty(listed, dtype=torch.int32, device=device)
        slot_mapping = torch.empty(groups, num_tokens, dtype=torch.int64, device=device)
        block_tables = torch.empty(groups, rows, width, dtype=torch.int32, device=device)
        step_state.prepare(
            inputs.slots[:listed],
            inputs.starts,
            inputs.query_starts,
            tables.tokens,
            tables.blocks,
            block_size=tables.block_size,
            most=max(shape.prefill_tokens, 1),
            advance=not shape.prefill_rows,
            token_ids=token_ids,
            positions=positions,
            seq_lens=seq_lens,
            slot_mapping=slot_mapping,
            pdl=self._pdl,
        )
        step_state.gather_blocks(
            inputs.slots[:rows],
            seq_lens,
            tables.blocks,
            tables.block_size,
            out=block_tables,
            pdl=self._pdl,
        )
        query_lens, context_lens = lengths
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            query_starts=inputs.query_starts[: rows + 1],
            seq_lens=seq_lens[:rows],
            num_decodes=shape.decodes,
            query_lens=query_lens,
            context_lens=context_lens,
            groups=[
                GroupBatch(slot_mapping[g], block_tables[g], window)
                for g, window in enumerate(self._windows)
            ],
            picked=picked,
        )


def statuses_at(count: int) -> int:
    """Return where the statuses of *count* samples begin, in bytes."""
    return -(-4 * count // SAMPLE_ALIGNMENT) * SAMPLE_ALIGNMENT
