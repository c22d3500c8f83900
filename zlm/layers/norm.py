"""RMSNorm as checkpoints store it."""

from torch import Tensor

from zlm.config import ModelSpec
from zlm.layers.parameters import Parameters
from zlm.ops.backend import Norm


def rms_norm(parameters: Parameters, name: str, spec: ModelSpec) -> Norm:
    """Return the norm with the weight of *name*."""
    weight = final_weight(parameters[f"{name}.weight"], spec)
    return parameters.ops.norm(weight, spec.rms_norm_eps)


def final_weight(weight: Tensor, spec: ModelSpec) -> Tensor:
    """Return what a norm multiplies by, float32: the weight, or 1 + weight (Gemma)."""
    wide = weight.float()
    return 1.0 + wide if spec.norm_plus_one else wide
