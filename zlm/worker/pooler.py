"""From hidden states to one vector a sequence: the token that stands for it, or the mean of all.

``Pooler`` owns the dense layers on top and, for prompts that come in chunks, what is to be kept of
those before the last. What is done to a vector afterwards (cutting, length 1, functions of logits)
is the tokenizer process's: it depends on the request.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.config import DenseSpec, PoolingSpec
from zlm.worker.step_inputs import StepRows


@dataclass(frozen=True, slots=True)
class Dense:
    """activation(x @ weight.T + bias), in float32."""

    weight: Tensor  # [N, K]
    bias: Tensor | None
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out.tanh_() if self.activation == "tanh" else out


def read_dense(
    layers: tuple[DenseSpec, ...], read: Callable[[DenseSpec, str], Tensor], device: torch.device
) -> list[Dense]:
    """Return *layers* with their tensors; *read* gives one by its layer and its full name."""
    return [
        Dense(
            read(layer, f"{layer.name}.weight").to(device, torch.float32),
            read(layer, f"{layer.name}.bias").to(device, torch.float32) if layer.bias else None,
            layer.activation,
        )
        for layer in layers
    ]


class Pooler:
    """Pools the rows of steps. Owns what is kept of sequences that are not complete."""

    def __init__(self, pooling: PoolingSpec, dense: list[Dense], hidden_size: int) -> None:
        self._kind = pooling.kind
        self._dense = dense
        # By slot, float32 [H]: the sum over the chunks so far, or the first token's vector.
        self._kept: dict[int, Tensor] = {}
        self.width = dense[-1].weight.shape[0] if dense else hidden_size

    def __call__(self, rows: StepRows, hidden: Tensor, ends: np.ndarray) -> Tensor:
        """Return float32 [E, width]: the vectors of the rows that are marked in *ends* bool [R].

        hidden [T, H] is the step's; of rows that do not end their part is kept.
        """
        if self._kind == "mean":
            vectors = self._means(rows, hidden, ends)
        elif self._kind == "cls":
            vectors = self._firsts(rows, hidden, ends)
        else:
            places = torch.from_numpy(rows.offsets[1:][ends] - 1)
            vectors = hidden[places.to(hidden.device)].float()
        for layer in self._dense:
            vectors = layer(vectors)
        return vectors

    def _firsts(self, rows: StepRows, hidden: Tensor, ends: np.ndarray) -> Tensor:
        firsts = hidden[torch.from_numpy(rows.offsets[:-1]).to(hidden.device)].float()
        for row, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
            before = self._kept.pop(int(slot), None)
            if start and before is not None:
                firsts[row] = before
            if not ends[row]:
                self._kept[int(slot)] = firsts[row]
        return firsts[torch.from_numpy(np.flatnonzero(ends)).to(hidden.device)]

    def _means(self, rows: StepRows, hidden: Tensor, ends: np.ndarray) -> Tensor:
        row_of_token = torch.from_numpy(rows.row_of_token).to(hidden.device)
        sums = torch.zeros(len(rows.slots), hidden.shape[1], device=hidden.device)
        sums.index_add_(0, row_of_token, hidden.float())
        for row, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
            before = self._kept.pop(int(slot), None)
            if start and before is not None:
                sums[row] += before
            if not ends[row]:
                self._kept[int(slot)] = sums[row]
        lengths = torch.from_numpy(rows.starts + rows.counts).to(hidden.device)
        chosen = torch.from_numpy(np.flatnonzero(ends)).to(hidden.device)
        return sums[chosen] / lengths[chosen, None]
