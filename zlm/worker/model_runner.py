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

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Execute, LogprobColumns, StepResult
from zlm.models.registry import Model
from zlm.ops import kv_cache
from zlm.worker import logprobs, sampler, step_inputs
from zlm.worker.slots import SlotTables
from zlm.worker.step_inputs import StepRows

PROMPT_LOGITS_BYTES = 64 * 2**20  # prompt log-probabilities are computed in pieces of this size


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
        self._vocab_size = vocab_size
        self._prompt_rows = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))

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
        prompt = self._prompt_logprobs(rows, hidden)
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

    def _prompt_logprobs(self, rows: StepRows, hidden: Tensor) -> LogprobColumns | None:
        """Report the prompt tokens that follow the tokens of this step, for rows that ask.

        Row k's entries are of prompt positions ``starts + 1 .. starts + counts``, as far as the
        prompt goes; ``rows`` says the message row.
        """
        sampling = self._tables.sampling
        wanted = np.minimum(sampling.prompt_logprobs[rows.slots], self._vocab_size)
        if (wanted < 0).all():
            return None
        following = rows.positions + 1
        inside = following < sampling.num_prompt[rows.slots][rows.row_of_token]
        chosen = np.flatnonzero(inside & (wanted >= 0)[rows.row_of_token])
        row = rows.row_of_token[chosen]
        slots, columns = self._index(rows.slots[row]), self._index(following[chosen])
        tokens = self._tables.tokens[slots, columns].long()
        places, counts = self._index(chosen), self._index(wanted[row] + 1)
        reported_rows = self._index(rows.order[row])
        pieces = []
        for start in range(0, len(chosen), self._prompt_rows):
            piece = slice(start, start + self._prompt_rows)
            raw = torch.log_softmax(self._model.logits(hidden[places[piece]]), dim=-1)
            most = int(counts[piece].max())
            pieces.append(
                logprobs.columns(raw, tokens[piece], reported_rows[piece], counts[piece], most)
            )
        return logprobs.join(pieces)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
