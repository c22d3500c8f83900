"""What a layer's attention makes of q·k, where it is not torch's plain scaled product."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """q·k times *scale*, and with *softcap* c > 0 then c tanh(score / c).

    sinks: [Hq], a score of each head that takes its share of the softmax and gives nothing.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing but *scale* is there."""
        return not self.softcap and self.sinks is None

    def apply_(self, scores: Tensor) -> Tensor:
        """Return the scores of the products *scores*, in place."""
        if not self.softcap:
            return scores.mul_(self.scale)
        return scores.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)

    def weights(self, scores: Tensor) -> Tensor:
        """Return the softmax of masked *scores* over S, and over the sink.

        scores: [r, Hq, L, S], or [r, Hkv, Hq / Hkv, S] of single queries.
        """
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = (
            self.sinks.to(scores.dtype).view(scores.shape[-3], -1, 1).expand(*scores.shape[:-1], 1)
        )
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
