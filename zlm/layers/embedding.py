"""Token embedding and language-model head; with tied weights both come from one tensor.

The embedding is read by rows, the head is multiplied with, so that each is kept in the form that
does its work best. On the CPU the head's packed copy of a tied embedding costs the vocabulary once
more in memory and makes the product, the largest of a step, two to five times faster.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops import linear


class Embedding:
    """Rows of *weight* [V, H], times *scale*."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        self.weight = weight
        # The factor is rounded to the weights' type, as the models were trained with.
        self.scale = torch.tensor(scale, dtype=weight.dtype).item()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [T, H] for int64 [T]."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


class LMHead:
    """Logits in float32, with Gemma's soft cap where there is one."""

    def __init__(self, weight: Tensor, softcap: float) -> None:
        self.product = linear.pack(weight)
        self.softcap = softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32 for hidden [S, H]."""
        logits = self.product(hidden).float()
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits
