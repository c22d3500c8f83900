"""RMSNorm as checkpoints store it."""

from torch import Tensor

from zlm.ops.norm import RMSNorm


def rms_norm(weight: Tensor, eps: float, *, plus_one: bool) -> RMSNorm:
    """Return the norm with *weight* [D], or with 1 + weight (Gemma)."""
    wide = weight.float()
    return RMSNorm(1.0 + wide if plus_one else wide, eps)
