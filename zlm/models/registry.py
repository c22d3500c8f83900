"""From a spec and a checkpoint to a model that runs. The families are a table.

Every tensor's name is checked before the first layer is built, its shape when it is read. Knows
nothing of files or of steps.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.errors import ModelError
from zlm.layers.parameters import Parameters
from zlm.models import shares
from zlm.models.bert import Bert
from zlm.models.gemma import Gemma
from zlm.models.gemma4 import Gemma4
from zlm.models.llama import Llama
from zlm.models.modernbert import ModernBert
from zlm.models.nomic_bert import NomicBert
from zlm.models.tensors import EMBEDDING, HEAD, check_names, check_shape, expected_tensors
from zlm.ops.backend import Ops
from zlm.ops.batch import StepBatch
from zlm.ops.block_matrix import BlockMatrix, Rows
from zlm.ops.parallel import ALONE, Parallel
from zlm.weights.parts import read_tensor
from zlm.weights.region import Choose, Region

log = logging.getLogger(__name__)


class Model(Protocol):
    """A model ready to compute steps."""

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states of a step, [T, H] or of the picked tokens, [S, H].

        ``caches[layer]`` take its keys and values.
        """

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
    "llama4": Llama,
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
    quantized: Callable[[str, Choose], BlockMatrix | None] | None = None,
    rows: Callable[[str], Rows | None] | None = None,
    parallel: Parallel = ALONE,
    on_read: Callable[[str, int], None] | None = None,
) -> Model:
    """Build the model of *spec* from *weights*, to compute with *ops*.

    max_model_len: longest sequence in tokens, for which positions are prepared. quantized: gives
    what is chosen of weights that are to stay so, for ops that take them. rows: gives what reads
    single rows of a weight from its file, where that is better than to keep it. parallel: the
    ranks, of each of which this builds the part. on_read: is called with the name of each tensor
    that has been read, and how many there are. Raises ModelError that names missing, unexpected and
    misshapen tensors.
    """
    if spec.architecture not in MODELS:
        known = ", ".join(MODELS)
        raise ModelError(f"architecture {spec.architecture} is not supported (known: {known})")
    names = set(weights.names())
    expected = expected_tensors(spec)
    check_names(spec, expected, names)

    def region(name: str, shape: Iterable[int]) -> Region | None:
        check_shape(expected, name, shape)
        return shares.region(spec, name, tuple(shape), parallel.rank, parallel.size)

    stage = parallel.stage
    first, last = shares.layers_of_stage(spec, stage.index, stage.count)

    def read(name: str) -> Tensor:
        name = shares.moved_layer(name, first)
        tensor = read_tensor(weights, name, partial(region, name))
        if on_read is not None:
            on_read(name, len(names))
        return tensor

    if spec.tie_embeddings and HEAD in names and not torch.equal(read(HEAD), read(EMBEDDING)):
        log.warning(
            "%s differs from %s, but the configuration says that they are tied: the embedding is "
            "used for both",
            HEAD,
            EMBEDDING,
        )

    def read_quantized(name: str) -> BlockMatrix | None:
        name = shares.moved_layer(name, first)
        matrix = None if quantized is None else quantized(name, partial(region, name))
        if matrix is not None and on_read is not None:
            on_read(name, len(names))
        return matrix

    own_names = {shares.moved_layer(name, -first) for name in names}
    parameters = Parameters(
        read, own_names, ops, read_quantized=read_quantized, read_rows=rows, parallel=parallel
    )
    own_spec = shares.spec_of_rank(shares.spec_of_stage(spec, first, last), parallel.size)
    with torch.inference_mode():
        return MODELS[spec.architecture](own_spec, parameters, max_model_len)
