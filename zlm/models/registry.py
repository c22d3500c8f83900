"""From a spec and a checkpoint to a model that runs. The families are a table.

Every tensor's name is checked before the first layer is built, its shape when it is read. Knows
nothing of files or of steps.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.errors import ModelError
from zlm.layers.parameters import Parameters
from zlm.models.bert import Bert
from zlm.models.gemma import Gemma
from zlm.models.gemma4 import Gemma4
from zlm.models.llama import Llama
from zlm.models.modernbert import ModernBert
from zlm.models.nomic_bert import NomicBert
from zlm.models.tensors import EMBEDDING, HEAD, check_names, check_shape, expected_tensors
from zlm.ops.backend import Ops
from zlm.ops.batch import StepBatch
from zlm.ops.block_matrix import BlockMatrix

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


MODELS: dict[
    str, type[Llama] | type[Gemma] | type[Gemma4] | type[Bert] | type[ModernBert] | type[NomicBert]
] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "mixtral": Llama,
    "gpt_oss": Llama,
    "qwen2_moe": Llama,
    "qwen3_moe": Llama,
    "gemma2": Gemma,
    "gemma3": Gemma,
    "gemma4": Gemma4,
    "phi3": Llama,
    "olmo2": Llama,
    "olmo3": Llama,
    "smollm3": Llama,
    "bert": Bert,
    "modernbert": ModernBert,
    "nomic_bert": NomicBert,
}


def build(
    spec: ModelSpec,
    weights: Weights,
    *,
    ops: Ops,
    max_model_len: int,
    quantized: Callable[[str], BlockMatrix | None] | None = None,
) -> Model:
    """Build the model of *spec* from *weights*, to compute with *ops*.

    max_model_len: longest sequence in tokens, for which positions are prepared. quantized: gives
    the weights that are to stay so, for ops that take them. Raises ModelError
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

    def read_quantized(name: str) -> BlockMatrix | None:
        matrix = quantized(name) if quantized is not None else None
        if matrix is not None:
            check_shape(expected, name, matrix.shape)
        return matrix

    parameters = Parameters(read, names, ops, read_quantized=read_quantized)
    with torch.inference_mode():
        return MODELS[spec.architecture](spec, parameters, max_model_len)
