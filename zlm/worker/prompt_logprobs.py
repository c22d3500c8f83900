"""Log-probabilities of prompt tokens: computed from a step's hidden states, in pieces.

Rare, and as large as the prompt times the vocabulary: so it is done by plain torch on any device
and waits for the result.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from zlm.messages import LogprobColumns
from zlm.models.registry import Model
from zlm.worker import logprobs
from zlm.worker.step_inputs import StepRows

LOGITS_BYTES = 64 * 2**20  # logits are computed in pieces of this size


class PromptColumns(Protocol):
    """What is known of every slot, on the host."""

    num_prompt: np.ndarray  # int64 [slots]
    prompt_logprobs: np.ndarray  # int64 [slots]: alternatives wanted, -1: none


class PromptLogprobs:
    """Reports prompt tokens for *model*. Owns nothing."""

    def __init__(self, model: Model, vocab_size: int, device: torch.device) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._device = device
        self._piece = max(1, LOGITS_BYTES // (4 * vocab_size))

    def wanted(self, rows: StepRows, columns: PromptColumns) -> bool:
        """Tell whether a row of the step asks for them and has prompt tokens to report."""
        follow = rows.starts + 1 < columns.num_prompt[rows.slots]
        return bool((follow & (columns.prompt_logprobs[rows.slots] >= 0)).any())

    def columns(
        self,
        rows: StepRows,
        places: np.ndarray,
        hidden: Tensor,
        tokens: Tensor,
        columns: PromptColumns,
    ) -> LogprobColumns | None:
        """Report the prompt tokens that follow the tokens of this step, for rows that ask.

        Row k's entries are of prompt positions ``starts + 1 .. starts + counts``, as far as the
        prompt goes; ``rows`` says the message row. *places*: where the step's tokens stand in
        *hidden*; *tokens*: the token table.
        """
        wanted = np.minimum(columns.prompt_logprobs[rows.slots], self._vocab_size)
        following = rows.positions + 1
        inside = following < columns.num_prompt[rows.slots][rows.row_of_token]
        chosen = np.flatnonzero(inside & (wanted >= 0)[rows.row_of_token])
        row = rows.row_of_token[chosen]
        slots, positions = self._index(rows.slots[row]), self._index(following[chosen])
        targets = tokens[slots, positions].long()
        where, counts = self._index(places[chosen]), self._index(wanted[row] + 1)
        reported = self._index(rows.order[row])
        pieces = []
        for start in range(0, len(chosen), self._piece):
            piece = slice(start, start + self._piece)
            raw = torch.log_softmax(self._model.logits(hidden[where[piece]]), dim=-1)
            most = int(counts[piece].max())
            pieces.append(
                logprobs.columns(raw, targets[piece], reported[piece], counts[piece], most)
            )
        return logprobs.join(pieces)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
