"""POST /classify: the request, and the form of its answer. Pure."""

from typing import Any

import numpy as np

from zlm.config import PoolingSpec, Resolved
from zlm.errors import BadRequest
from zlm.frontend.openai.answer import AnswerHead
from zlm.frontend.openai.body import BodyDecoder
from zlm.frontend.openai.embeddings import InputFields, usage
from zlm.messages import Pooled
from zlm.pooling_params import PoolingParams


class ClassifyRequest(InputFields, kw_only=True):
    """The body."""

    use_activation: bool | None = None


decoder = BodyDecoder(ClassifyRequest)


def classify_params(request: ClassifyRequest, resolved: Resolved) -> PoolingParams:
    """Return what /classify does; raise BadRequest if this model has no labels for whole texts."""
    pooling = resolved.spec.pooling or PoolingSpec()
    if not pooling.num_labels or pooling.kind == "tokens":
        instead = "/v1/embeddings" if not pooling.num_labels else "/pooling: it labels tokens"
        raise BadRequest(
            f"this model has no classification head for whole texts: use {instead}",
            param="model",
            code="model_not_supported",
        )
    return PoolingParams(activation=request.use_activation, task="classify")


class ClassifyForm:
    """How probabilities become the answer: those of all labels, and the likeliest label's name."""

    def __init__(self, resolved: Resolved, model: str) -> None:
        self._head = AnswerHead.new("classify", model)
        self._labels = (resolved.spec.pooling or PoolingSpec()).labels

    def __call__(self, pooled: Pooled) -> dict[str, Any]:
        """Return the body of the answer."""
        data = [self._classified(i, vector) for i, vector in enumerate(pooled.vectors)]
        return self._head.fields("list") | {"data": data, "usage": usage(pooled)}

    def _classified(self, index: int, vector: bytes) -> dict[str, Any]:
        probs = np.frombuffer(vector, "<f4")
        return {
            "index": index,
            "label": self._labels[int(probs.argmax())],
            "probs": probs.tolist(),
            "num_classes": len(probs),
        }
