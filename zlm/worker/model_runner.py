"""One step: from ``Execute`` to ``StepResult``.

``ModelRunner`` owns the model, its KV caches and the slot tables (the device's whole state) and
applies the messages of the engine core strictly in order. It knows positions, slots and blocks; it
does not know requests, text, or why a row is in a step.

    joins, table entries, block copies → gather the batch → forward → logits of the sampling rows
    → sample → store the tokens in the slots' tables → result

The store comes last, and a later step's gather reads it: so a step may be sent before the tokens
that it computes on are known to the engine core (run-ahead).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Execute, LogprobColumns, Masks, StepResult
from zlm.models.registry import Model
from zlm.ops import kv_cache
from zlm.worker import sampler, step_inputs, token_masks
from zlm.worker.group_caches import copies_by_group
from zlm.worker.prompt_logprobs import PromptLogprobs
from zlm.worker.runner import EndedSteps
from zlm.worker.slots import SlotTables
from zlm.worker.step_inputs import StepRows


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step after its forward pass; ``hidden`` has a row a token. ``rows`` None: it has none."""

    step: int
    rows: StepRows | None
    hidden: Tensor | None
    prompt: LogprobColumns | None
    seconds: float


class ModelRunner(EndedSteps):
    """Owns model, caches and slot tables; executes steps in order.

    ``caches`` holds one tensor a layer; group g has the layers ``group_layers[g]`` and the
    attention window ``windows[g]`` (0: full).
    """

    def __init__(
        self,
        model: Model,
        caches: list[Tensor],
        tables: SlotTables,
        *,
        group_layers: Sequence[Sequence[int]],
        windows: Sequence[int],
        block_size: int,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self._model = model
        self._caches = caches
        self._tables = tables
        self._group_layers = [list(layers) for layers in group_layers]
        self._windows = list(windows)
        self._block_size = block_size
        self._prompt = PromptLogprobs(model, vocab_size, tables.tokens.device)
        self._vocab_size = vocab_size
        self._unsampled: _Computed | None = None  # waits for its masks

    def launch(self, message: Execute) -> None:
        """Execute a step: on the CPU it has ended when this returns, unless it waits for masks."""
        assert self._unsampled is None, "the step before has not sampled yet"
        computed = self._compute(message)
        if message.masked:
            self._unsampled = computed
        else:
            self._results.append(self._complete(computed, None))

    @property
    def awaits_masks(self) -> bool:
        """Whether the last step launched waits for its masks."""
        return self._unsampled is not None

    def mask(self, masks: Masks) -> None:
        """Let the step that waits for *masks* sample."""
        computed, self._unsampled = self._unsampled, None
        assert computed is not None and computed.step == masks.step, "masks of another step"
        self._results.append(self._complete(computed, masks))

    def execute(self, message: Execute, masks: Masks | None = None) -> StepResult:
        """Apply the changes in *message*, run its rows, and return what they sampled."""
        return self._complete(self._compute(message), masks)

    @torch.inference_mode()
    def _compute(self, message: Execute) -> _Computed:
        """Apply the changes in *message* and run the model over its rows."""
        began = time.perf_counter()
        tables = self._tables
        tables.apply(message)
        if message.copies:
            self.copy_blocks(message.copies)
        if not message.slots:
            return _Computed(message.step, None, None, None, time.perf_counter() - began)
        rows = step_inputs.read(message)
        batch = step_inputs.batch(rows, tables, self._windows, self._block_size)
        hidden = self._model.forward(batch, self._caches)
        prompt = None
        if self._prompt.wanted(rows, tables.sampling):
            places = np.arange(rows.num_tokens)
            prompt = self._prompt.columns(rows, places, hidden, tables.tokens, tables.sampling)
        return _Computed(message.step, rows, hidden, prompt, time.perf_counter() - began)

    @torch.inference_mode()
    def _complete(self, computed: _Computed, masks: Masks | None) -> StepResult:
        """Sample the rows that ask for it and return the result."""
        began = time.perf_counter()
        rows, hidden = computed.rows, computed.hidden
        token_ids, status, reported = b"", b"", None
        if rows is not None and hidden is not None and len(rows.sampled_slots):
            token_ids, status, reported = self._sample(rows, hidden, masks)
        return StepResult(
            step=computed.step,
            token_ids=token_ids,
            status=status,
            logprobs=reported,
            prompt_logprobs=computed.prompt,
            seconds=computed.seconds + time.perf_counter() - began,
        )

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV blocks, each (group, from, to), in all layers of their groups."""
        for layers, sources, targets in copies_by_group(copies, self._group_layers):
            kv_cache.copy_blocks([self._caches[layer] for layer in layers], sources, targets)

    @property
    def _device(self) -> torch.device:
        return self._tables.tokens.device

    def _sample(
        self, rows: StepRows, hidden: Tensor, masks: Masks | None
    ) -> tuple[bytes, bytes, LogprobColumns | None]:
        """Sample the rows that ask for it and store the tokens; columns in message order."""
        tables = self._tables
        logits = self._model.logits(hidden[self._index(rows.sampled_tokens)])
        selected = tables.sampling.rows(rows.sampled_slots)
        lengths = self._index(rows.sampled_lengths)
        masked = None
        if masks is not None:
            masked = token_masks.masked_rows(masks, self._vocab_size, self._device)
        sampled = sampler.sample(logits, selected, lengths, tables.tokens, masked)
        tables.store(selected.slots, lengths, sampled.tokens)
        status = b"" if sampled.status is None else sampled.status.cpu().numpy().tobytes()
        token_ids = sampled.tokens.cpu().numpy().astype(np.int32).tobytes()
        return token_ids, status, sampled.logprobs

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
