"""What stands before a decoder's first layer and after its last: embedding, final norm and head.

In a pipeline the first stage alone has the embedding, the last alone norm and head; a stage gets
what the layers before its own give, and sends on what its own do.
"""

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.layers.norm import rms_norm
from zlm.layers.parameters import Parameters
from zlm.ops.backend import Embedding, LMHead, Norm
from zlm.ops.block_matrix import Weight


class Ends:
    """Parameters ``model.embed_tokens``, ``model.norm`` and, unless it is tied, ``lm_head``."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, dtype: torch.dtype) -> None:
        """*dtype*: of the residual."""
        ops, parallel, model = parameters.ops, parameters.parallel, parameters.under("model")
        self._stage = stage = parallel.stage
        has_head = stage.is_last and spec.pooling is None
        self._device, self._like = ops.device, (spec.hidden_size, dtype)
        self._embedding: Embedding | None = None
        self.norm: Norm | None = rms_norm(model, "norm", spec) if stage.is_last else None
        self.head: LMHead | None = None
        weight: Weight | None = None
        if stage.is_first or (has_head and spec.tie_embeddings):
            weight = model.product("embed_tokens.weight")
        if stage.is_first and weight is not None:
            rows = model.rows("embed_tokens.weight", weight)
            own_rows = ops.embedding(rows, spec.embedding_scale, dtype)
            self._embedding = parallel.embedding(own_rows, weight.shape[0])
        if has_head:
            if weight is None or not spec.tie_embeddings:
                weight = parameters.product("lm_head.weight")
            self.head = parallel.head(ops.lm_head(weight, spec.final_softcap), spec.vocab_size)

    def enter(self, token_ids: Tensor) -> Tensor:
        """Return the residual [T', H] before the first layer of this stage."""
        if self._embedding is not None:
            return self._embedding(token_ids)
        width, dtype = self._like
        shape = token_ids.shape[0], width
        return self._stage.receive(torch.empty(shape, dtype=dtype, device=self._device))

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the normed residual after the last layer, or send it on as it is."""
        return self.norm(hidden) if self.norm is not None else self.send(hidden)

    def send(self, hidden: Tensor) -> Tensor:
        """Give *hidden* to the next stage, and return it."""
        self._stage.send(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32; see ``zlm.models.registry.Model``."""
        assert self.head is not None, (
            "a pooled model has no logits, nor has a stage before the last"
        )
        return self.head(hidden)
