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
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Execute, LogprobColumns, StepResult
from zlm.models.registry import Model
from zlm.ops import kv_cache
from zlm.worker import sampler, step_inputs
from zlm.worker.prompt_logprobs import PromptLogprobs
from zlm.worker.slots import SlotTables
from zlm.worker.step_inputs import StepRows


class ModelRunner:
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
        self._model = model
        self._caches = caches
        self._tables = tables
        self._group_layers = [list(layers) for layers in group_layers]
        self._windows = list(windows)
        self._block_size = block_size
        self._prompt = PromptLogprobs(model, vocab_size, tables.tokens.device)
        self._results: deque[StepResult] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched that has not been collected."""
        return bool(self._results)

    def launch(self, message: Execute) -> None:
        """Execute a step: on the CPU it has ended when this returns."""
        self._results.append(self.execute(message))

    def done(self) -> bool:
        """Tell whether the oldest step launched has ended."""
        return True

    def collect(self) -> StepResult:
        """Return the result of the oldest step launched."""
        return self._results.popleft()

    def use_idle_time(self) -> bool:
        """Do nothing: nothing can wait."""
        return False

    @torch.inference_mode()
    def execute(self, message: Execute) -> StepResult:
        """Apply the changes in *message*, run its rows, and return what they sampled."""
        began = time.perf_counter()
        tables = self._tables
        tables.apply(message)
        if message.copies:
            self.copy_blocks(message.copies)
        if not message.slots:
            seconds = time.perf_counter() - began
            return StepResult(step=message.step, token_ids=b"", seconds=seconds)
        rows = step_inputs.read(message)
        batch = step_inputs.batch(rows, tables, self._windows, self._block_size)
        hidden = self._model.forward(batch, self._caches)
        prompt = None
        if self._prompt.wanted(rows, tables.sampling):
            places = np.arange(rows.num_tokens)
            prompt = self._prompt.columns(rows, places, hidden, tables.tokens, tables.sampling)
        token_ids, status, reported = b"", b"", None
        if len(rows.sampled_slots):
            token_ids, status, reported = self._sample(rows, hidden)
        return StepResult(
            step=message.step,
            token_ids=token_ids,
            status=status,
            logprobs=reported,
            prompt_logprobs=prompt,
            seconds=time.perf_counter() - began,
        )

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV blocks, each (group, from, to), in all layers of their groups."""
        for group, layers in enumerate(self._group_layers):
            sources = [source for g, source, _ in copies if g == group]
            targets = [target for g, _, target in copies if g == group]
            kv_cache.copy_blocks([self._caches[layer] for layer in layers], sources, targets)

    @property
    def _device(self) -> torch.device:
        return self._tables.tokens.device

    def _sample(self, rows: StepRows, hidden: Tensor) -> tuple[bytes, bytes, LogprobColumns | None]:
        """Sample the rows that ask for it and store the tokens; columns in message order."""
        tables = self._tables
        logits = self._model.logits(hidden[self._index(rows.sampled_tokens)])
        selected = tables.sampling.rows(rows.sampled_slots)
        lengths = self._index(rows.sampled_lengths)
        sampled = sampler.sample(logits, selected, lengths, tables.tokens)
        tables.store(selected.slots, lengths, sampled.tokens)
        status = b"" if sampled.status is None else sampled.status.cpu().numpy().tobytes()
        token_ids = sampled.tokens.cpu().numpy().astype(np.int32).tobytes()
        return token_ids, status, sampled.logprobs

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
