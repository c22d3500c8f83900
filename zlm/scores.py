"""Scores of pairs of texts: what is asked of a model that is pooled, and what its vectors mean.

A cross-encoder reads both texts at once and gives the score itself. Of any other embedding model
the score is the cosine of the two texts' vectors. Pure; the server and ``LLM`` use it.
"""

import msgspec
import numpy as np

from zlm.config import PoolingSpec
from zlm.errors import BadRequest


class Pairs(msgspec.Struct, frozen=True):
    """Texts to be scored against each other: one first for all seconds, or as many."""

    firsts: list[str]
    seconds: list[str]


def pooled_texts(pairs: Pairs, pooling: PoolingSpec) -> tuple[list[str | list[int]], list[str]]:
    """Return the prompts of Pool and, of a cross-encoder, their seconds.

    Raises BadRequest if the model classifies, or labels tokens, and does not score.
    """
    if pooling.kind == "tokens":
        raise BadRequest(
            "this model gives something for each token, and no score of texts",
            param="model",
            code="model_not_supported",
        )
    if not pooling.num_labels:
        return [*pairs.firsts, *pairs.seconds], []
    if pooling.num_labels > 1:
        raise BadRequest(
            f"this model has {pooling.num_labels} labels: a score needs a model with one",
            param="model",
            code="model_not_supported",
        )
    repeats = len(pairs.seconds) // len(pairs.firsts)
    return [text for text in pairs.firsts for _ in range(repeats)], pairs.seconds


def scores(vectors: list[bytes], num_pairs: int, *, is_cross_encoder: bool) -> list[float]:
    """Return the score of each pair: what the model says, or the cosine of the two vectors."""
    if is_cross_encoder:
        return [float(np.frombuffer(vector, "<f4")[0]) for vector in vectors]
    wide = np.stack([np.frombuffer(vector, "<f4") for vector in vectors]).astype(np.float64)
    wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    firsts, seconds = wide[:-num_pairs], wide[-num_pairs:]
    cosines: list[float] = (firsts * seconds).sum(axis=1).tolist()
    return cosines
