"""Which experts a token goes to, and its share of each: what every backend must do."""

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops.backend import Mixture


def route(logits: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return shares float32 [T, k] and experts int64 [T, k] for a router's logits [T, E].

    Numbers of experts are in range whatever the logits are, NaN too.
    """
    if mixture.sigmoid:
        chosen, experts = torch.topk(logits.float(), mixture.chosen, -1)
        # As a softmax with 0, which goes row by row: the bits of torch's sigmoid depend on how many
        # numbers there are.
        return F.pad(chosen.unsqueeze(-1), (0, 1)).softmax(-1)[..., 0], experts
    shares, experts = torch.topk(logits.float().softmax(-1), mixture.chosen, -1)
    if mixture.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, experts
