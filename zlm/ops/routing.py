"""Which experts a token goes to, and its share of each: what every backend must do."""

import torch
from torch import Tensor

from zlm.ops.backend import Mixture


def route(logits: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return shares float32 [T, k] and experts int64 [T, k] for a router's logits [T, E].

    Numbers of experts are in range whatever the logits are, NaN too.
    """
    shares, experts = torch.topk(logits.float().softmax(-1), mixture.chosen, -1)
    if mixture.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, experts
