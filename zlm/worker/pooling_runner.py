"""One step of a model that gives vectors: from ``Execute`` to ``StepResult``, nothing sampled.

``PoolingRunner`` owns the model, its KV caches (an encoder has none) and the slot tables, and
applies the messages of the engine core strictly in order, as ``ModelRunner`` does for text. A row
that reaches the end of its prompt is pooled, and its vector, or those of its tokens, reported.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zlm.messages import Execute, Masks, PooledColumns, StepResult
from zlm.models.registry import Model
from zlm.ops.backend import Ops
from zlm.worker import step_inputs
from zlm.worker.group_caches import copies_by_group
from zlm.worker.pooler import Pooler
from zlm.worker.runner import EndedSteps
from zlm.worker.slots import SlotTables
from zlm.worker.step_inputs import StepRows

Flags = npt.NDArray[np.bool_]


class PoolingRunner(EndedSteps):
    """Owns model, pooler, caches and slot tables; executes steps in order.

    ``caches`` holds one tensor a layer; group g has the layers ``group_layers[g]`` and the
    attention window ``windows[g]`` (0: full). All three are empty for an encoder.
    """

    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        caches: list[Tensor],
        tables: SlotTables,
        *,
        ops: Ops,
        group_layers: Sequence[Sequence[int]],
        windows: Sequence[int],
        block_size: int,
        num_slots: int,
    ) -> None:
        super().__init__()
        self._model = model
        self._pooler = pooler
        self._caches = caches
        self._tables = tables
        self._ops = ops
        self._group_layers = [list(layers) for layers in group_layers]
        self._windows = list(windows)
        self._block_size = block_size
        self._lengths = np.zeros(num_slots, np.int64)  # of each slot's prompt
        self._seconds = np.zeros(num_slots, np.int64)  # where a pair's second text begins; 0: none
        self._by_token = np.zeros(num_slots, np.bool_)  # whether a vector a token is wanted

    @property
    def awaits_masks(self) -> bool:
        """Whether the last step launched waits for masks: never, nothing is sampled."""
        return False

    def mask(self, masks: Masks) -> None:
        """Raise: no step of this runner waits for masks."""
        raise RuntimeError(f"masks of step {masks.step} came for a model that samples nothing")

    def launch(self, message: Execute) -> None:
        """Execute a step: it has ended when this returns, for its vectors are read back."""
        self._results.append(self.execute(message))

    @torch.inference_mode()
    def execute(self, message: Execute) -> StepResult:
        """Apply the changes in *message*, run its rows, and return the vectors of those that end.

        Rows of ``pooled`` are those of the message.
        """
        began = time.perf_counter()
        self._apply(message)
        pooled = None
        if message.slots:
            rows = step_inputs.read(message)
            batch = step_inputs.batch(rows, self._tables, self._windows, self._block_size)
            types = self._token_types(rows)
            if types is not None:
                batch = dataclasses.replace(batch, token_types=types)
            hidden = self._model.forward(batch, self._caches)
            pooled = self._pool(rows, hidden)
        seconds = time.perf_counter() - began
        return StepResult(step=message.step, token_ids=b"", seconds=seconds, pooled=pooled)

    def _apply(self, message: Execute) -> None:
        for join in message.joins:
            self._lengths[join.slot] = join.num_prompt_tokens
            self._seconds[join.slot] = join.second_segment
            self._by_token[join.slot] = join.pool_tokens or self._pooler.only_tokens
        self._tables.apply(message)
        groups = self._group_layers if message.copies else ()
        for layers, sources, targets in copies_by_group(message.copies, groups):
            self._ops.copy_blocks([self._caches[layer] for layer in layers], sources, targets)

    def _token_types(self, rows: StepRows) -> Tensor | None:
        """Return the segment of each token, int64 [T], or None if there are no pairs."""
        seconds = self._seconds[rows.slots]
        if not seconds.any():
            return None
        begins = seconds[rows.row_of_token]
        types = ((begins > 0) & (rows.positions >= begins)).astype(np.int64)
        return torch.from_numpy(types).to(self._tables.tokens.device)

    def _pool(self, rows: StepRows, hidden: Tensor) -> PooledColumns | None:
        """Return the vectors of the rows that end their prompts; None if no row does."""
        ends = rows.starts + rows.counts == self._lengths[rows.slots]
        by_token = self._by_token[rows.slots]
        if by_token.any():
            return self._pool_tokens(rows, hidden, ends, by_token)
        vectors = self._pooler(rows, hidden, ends)
        if not ends.any():
            return None
        values = vectors.float().cpu().numpy()
        return PooledColumns(
            rows=rows.order[ends].astype(np.int32).tobytes(),
            width=self._pooler.width,
            values=values.tobytes(),
        )

    def _pool_tokens(
        self, rows: StepRows, hidden: Tensor, ends: Flags, by_token: Flags
    ) -> PooledColumns | None:
        """Do the same for a step in which some rows, *by_token*, have a vector for each token."""
        found: dict[int, Tensor] = {}  # by batch row
        if not by_token.all():
            # Rows by token are in no sequence's vector: what is kept of them is never asked for.
            vectors = self._pooler(rows, hidden, ends)
            found = dict(zip(np.flatnonzero(ends).tolist(), vectors.cpu(), strict=True))
        for row in np.flatnonzero(by_token).tolist():
            tokens = self._pooler.tokens(rows, hidden, row, ends=bool(ends[row]))
            if tokens is not None:
                found[row] = tokens
        if not found:
            return None
        chosen = sorted(found)
        values = [found[row].numpy() for row in chosen]
        return PooledColumns(
            rows=rows.order[chosen].astype(np.int32).tobytes(),
            width=self._pooler.width,
            values=b"".join(each.tobytes() for each in values),
            sizes=np.array([each.size for each in values], np.int32).tobytes(),
        )
