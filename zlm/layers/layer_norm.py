"""LayerNorm, the norm of encoders: (x - mean) / sqrt(variance + eps) * weight + bias."""

import torch.nn.functional as F
from torch import Tensor

from zlm.layers.parameters import Parameters


class LayerNorm:
    """Parameters ``weight`` and, if it is there, ``bias``."""

    def __init__(self, parameters: Parameters, eps: float) -> None:
        self.weight = parameters["weight"]
        self.bias = parameters.optional("bias")
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
