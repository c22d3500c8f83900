"""From a spec and a checkpoint to a model that runs. The families are a table.

Every tensor's name is checked before the first layer is built, its shape when it is read. Knows
nothing of files or of steps.
"""

import logging
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.errors import ModelError
from zlm.layers.parameters import Parameters
from zlm.models.bert import Bert
from zlm.models.gemma3 import Gemma3
from zlm.models.llama import Llama
from zlm.models.tensors import EMBEDDING, HEAD, check_names, check_shape, expected_tensors
from zlm.ops.backend import Ops
from zlm.ops.batch import StepBatch

log = logging.getLogger(__name__)


class Model(Protocol):
    """A model ready to compute steps."""

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H] of a step; ``caches[layer]`` take its keys and values."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32, a new tensor, for hidden states [S, H] of ``forward``."""


class Weights(Protocol):
    """Tensors by name, as ``zlm.weights.load`` opens them: fresh ones, owned by the caller."""

    def names(self) -> Iterable[str]: ...

    def get(self, name: str) -> Tensor: ...


MODELS: dict[str, type[Llama] | type[Gemma3] | type[Bert]] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "gemma3": Gemma3,
    "bert": Bert,
}


def build(
    spec: ModelSpec,
    weights: Weights,
    *,
    ops: Ops,
    max_model_len: int,
) -> Model:
    """Build the model of *spec* from *weights*, to compute with *ops*.

    max_model_len: longest sequence in tokens, for which positions are prepared. Raises ModelError
    that names missing, unexpected and misshapen tensors.
    """
    if spec.architecture not in MODELS:
        known = ", ".join(MODELS)
        raise ModelError(f"architecture {spec.architecture} is not supported (known: {known})")
    names = set(weights.names())
    expected = expected_tensors(spec)
    check_names(spec, expected, names)

    def read(name: str) -> Tensor:
        tensor = weights.get(name)
        check_shape(expected, name, tensor.shape)
        return tensor

    if spec.tie_embeddings and HEAD in names and not torch.equal(read(HEAD), read(EMBEDDING)):
        log.warning(
            "%s differs from %s, but the configuration says that they are tied: the embedding is "
            "used for both",
            HEAD,
            EMBEDDING,
        )
    parameters = Parameters(read, names, ops)
    with torch.inference_mode():
        return MODELS[spec.architecture](spec, parameters, max_model_len)
