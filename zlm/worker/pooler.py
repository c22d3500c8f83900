"""From hidden states to one vector a sequence, or one a token.

A sequence's vector is that of the token that stands for it, or a mean or the maximum of all; dense
layers stand on top. Vectors of tokens are the hidden states themselves, unless the model was made
for such vectors: then its dense layers are applied to each.

``Pooler`` owns the dense layers and, for prompts that come in chunks, what is to be kept of those
before the last. What is done to a vector afterwards (cutting, length 1, functions of logits) is the
tokenizer process's: it depends on the request.
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
    """activation(x @ weight.T + bias), perhaps normed, in float32."""

    weight: Tensor  # [N, K]
    bias: Tensor | None
    activation: str  # one of ACTIVATIONS
    norm: Tensor | None = None  # [N]: the weight of a LayerNorm at the end
    norm_bias: Tensor | None = None
    norm_eps: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        out = ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))
        if self.norm is None:
            return out
        return F.layer_norm(out, out.shape[-1:], self.norm, self.norm_bias, self.norm_eps)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
}


# The sum of tokens' vectors is divided by a number that depends on how many there are.
DIVISORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda count: count,
    "sqrt": np.sqrt,
    "weightedmean": lambda count: count * (count + 1) / 2,  # tokens weigh 1, 2, 3, ...
}


def read_dense(
    layers: tuple[DenseSpec, ...], read: Callable[[DenseSpec, str], Tensor], device: torch.device
) -> list[Dense]:
    """Return *layers* with their tensors; *read* gives one by its layer and its full name."""

    def tensor(layer: DenseSpec, name: str) -> Tensor:
        return read(layer, name).to(device, torch.float32)

    return [
        Dense(
            tensor(layer, f"{layer.name}.weight"),
            tensor(layer, f"{layer.name}.bias") if layer.bias else None,
            layer.activation,
            tensor(layer, f"{layer.norm}.weight") if layer.norm else None,
            tensor(layer, f"{layer.norm}.bias") if layer.norm and layer.norm_bias else None,
            layer.norm_eps,
        )
        for layer in layers
    ]


class Pooler:
    """Pools the rows of steps. Owns what is kept of sequences that are not complete."""

    def __init__(self, pooling: PoolingSpec, dense: list[Dense], hidden_size: int) -> None:
        self._kind = pooling.kind
        self._dense = dense
        # By slot, float32 [H]: sum or maximum of the chunks so far, or the first token's vector.
        self._kept: dict[int, Tensor] = {}
        # By slot: the vectors of the tokens of the chunks so far, off the device.
        self._chunks: dict[int, list[Tensor]] = {}
        self.width = dense[-1].weight.shape[0] if dense else hidden_size

    def __call__(self, rows: StepRows, hidden: Tensor, ends: np.ndarray) -> Tensor:
        """Return float32 [E, width]: the vectors of the rows that are marked in *ends* bool [R].

        hidden [T, H] is the step's; of rows that do not end their part is kept.
        """
        if self._kind in DIVISORS:
            vectors = self._means(rows, hidden, ends)
        elif self._kind == "max":
            vectors = self._maxima(rows, hidden, ends)
        elif self._kind == "cls":
            vectors = self._firsts(rows, hidden, ends)
        else:
            places = torch.from_numpy(rows.offsets[1:][ends] - 1)
            vectors = hidden[places.to(hidden.device)].float()
        return self._projected(vectors)

    @property
    def only_tokens(self) -> bool:
        """Whether the model was made for a vector a token, and has none of a whole sequence."""
        return self._kind == "tokens"

    def tokens(self, rows: StepRows, hidden: Tensor, row: int, *, ends: bool) -> Tensor | None:
        """Return float32 [L, N] on the CPU: a vector for each token of the sequence of *row*.

        None if it does not end here: the chunk is kept.
        """
        slot, start = int(rows.slots[row]), int(rows.starts[row])
        vectors = hidden[int(rows.offsets[row]) : int(rows.offsets[row + 1])].float()
        if self.only_tokens:
            vectors = self._projected(vectors)
        before = self._chunks.pop(slot, [])
        chunks = [*(before if start else ()), vectors.cpu()]
        if not ends:
            self._chunks[slot] = chunks
            return None
        return torch.cat(chunks)

    def _projected(self, vectors: Tensor) -> Tensor:
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
        values = hidden.float()
        if self._kind == "weightedmean":
            values = values * (torch.from_numpy(rows.positions).to(hidden.device) + 1)[:, None]
        sums.index_add_(0, row_of_token, values)
        for row, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
            before = self._kept.pop(int(slot), None)
            if start and before is not None:
                sums[row] += before
            if not ends[row]:
                self._kept[int(slot)] = sums[row]
        lengths = (rows.starts + rows.counts)[ends].astype(np.float64)
        divisors = torch.from_numpy(DIVISORS[self._kind](lengths)).to(hidden.device, torch.float32)
        chosen = torch.from_numpy(np.flatnonzero(ends)).to(hidden.device)
        return sums[chosen] / divisors[:, None]

    def _maxima(self, rows: StepRows, hidden: Tensor, ends: np.ndarray) -> Tensor:
        sizes = rows.counts.tolist()
        maxima = torch.stack([part.amax(0) for part in hidden[: sum(sizes)].float().split(sizes)])
        for row, (slot, start) in enumerate(zip(rows.slots, rows.starts, strict=True)):
            before = self._kept.pop(int(slot), None)
            if start and before is not None:
                maxima[row] = torch.maximum(maxima[row], before)
            if not ends[row]:
                self._kept[int(slot)] = maxima[row]
        return maxima[torch.from_numpy(np.flatnonzero(ends)).to(hidden.device)]
