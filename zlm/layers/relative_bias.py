"""Relative position bias of T5's kind (MPNet): added to q·k, by head and distance.

Near distances have a value each, farther ones share values in buckets that grow with distance, and
all beyond ``MAX_DISTANCE`` share the last; before and after are told apart.
"""

import math

import torch
from torch import Tensor

MAX_DISTANCE = 128  # tokens


class RelativeBias:
    """Owns the table of all distances between two tokens of a sequence."""

    def __init__(self, weight: Tensor, max_model_len: int) -> None:
        """weight [buckets, heads] as a checkpoint has it."""
        self._longest = max_model_len
        distances = torch.arange(1 - max_model_len, max_model_len, device=weight.device)
        self._values = weight[_buckets(distances, weight.shape[0])]  # [2 * longest - 1, heads]

    def __call__(self, length: int) -> Tensor:
        """Return [heads, length, length]: the bias of each query (rows) for each key."""
        places = torch.arange(length, device=self._values.device)
        distances = places - places[:, None] + self._longest - 1
        return self._values[distances].permute(2, 0, 1).contiguous()


def _buckets(distances: Tensor, count: int) -> Tensor:
    """Return the bucket of each distance (of a key from its query), int64."""
    half = count // 2
    exact = half // 2
    far = distances.abs()
    growth = torch.log(far.clamp_min(1).float() / exact) / math.log(MAX_DISTANCE / exact)
    shared = exact + (growth * (half - exact)).long()
    buckets = torch.where(far < exact, far, shared.clamp_max(half - 1))
    return buckets + (distances > 0) * half
