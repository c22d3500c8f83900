"""Scores of pairs of texts: what is asked of a model that is pooled, and what its vectors mean.

A cross-encoder reads both texts at once and gives the score itself. Of a model with a vector for
each text the score is the cosine of the two. Of one with a vector for each token (ColBERT's kind)
it is late interaction: for each token of the first text the cosine with the token of the second
that is nearest to it, summed. Pure; the server and ``LLM`` use it.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from zlm.config import PoolingSpec
from zlm.errors import BadRequest

Floats = npt.NDArray[np.float32]


class Pairs(msgspec.Struct, frozen=True):
    """Texts to be scored against each other: one first for all seconds, or as many.

    names: what the client calls the two fields.
    """

    firsts: list[str]
    seconds: list[str]
    names: tuple[str, str] = ("text_1", "text_2")


class PooledTexts(msgspec.Struct, frozen=True):
    """Fields of Pool: its prompts, what errors call each, and, of a cross-encoder, their seconds.

    Of a pair the name is that of the longer text.
    """

    prompts: list[str | list[int]]
    names: list[str]
    seconds: list[str] = []


def pooled_texts(pairs: Pairs, pooling: PoolingSpec) -> PooledTexts:
    """Return what is asked of the model.

    Raises BadRequest if the model classifies, or labels tokens, and does not score.
    """
    if pooling.kind == "tokens" and pooling.num_labels:
        raise BadRequest(
            "this model gives labels for each token, and no score of texts",
            param="model",
            code="model_not_supported",
        )
    first, second = pairs.names
    ones, twos = len(pairs.firsts), len(pairs.seconds)
    firsts = [first] if ones == 1 else [f"{first}[{i}]" for i in range(ones)]
    seconds = [f"{second}[{i}]" for i in range(twos)]
    if not pooling.num_labels:
        return PooledTexts([*pairs.firsts, *pairs.seconds], firsts + seconds)
    if pooling.num_labels > 1:
        raise BadRequest(
            f"this model has {pooling.num_labels} labels: a score needs a model with one",
            param="model",
            code="model_not_supported",
        )
    texts, firsts = pairs.firsts * (twos // ones), firsts * (twos // ones)
    names = [
        one if len(text) > len(other) else two
        for one, two, text, other in zip(firsts, seconds, texts, pairs.seconds, strict=True)
    ]
    return PooledTexts([*texts], names, pairs.seconds)


def scores(
    vectors: Sequence[bytes],
    num_pairs: int,
    *,
    is_cross_encoder: bool,
    lengths: Sequence[int] | None = None,
) -> list[float]:
    """Return the score of each pair, from what the model said of ``pooled_texts``.

    lengths: numbers of tokens of the texts, if there is a vector for each token.
    """
    if is_cross_encoder:
        return [float(np.frombuffer(vector, "<f4")[0]) for vector in vectors]
    texts = [
        _of_length_one(np.frombuffer(vector, "<f4").reshape(rows, -1))
        for vector, rows in zip(vectors, lengths or [1] * len(vectors), strict=True)
    ]
    firsts, seconds = texts[:-num_pairs], texts[-num_pairs:]
    firsts = firsts * (num_pairs // len(firsts))
    nearest = [(one @ two.T).max(axis=1) for one, two in zip(firsts, seconds, strict=True)]
    return [float(each.sum()) for each in nearest]


def _of_length_one(rows: Floats) -> Floats:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
