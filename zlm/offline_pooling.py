"""What the pooling calls of ``LLM`` and ``AsyncLLM`` ask of the engine, and what they return.

Pure: prompts to ``Pool`` messages, their answers to outputs. Every call takes ``pooling_params``
and ``truncate_prompt_tokens``, and raises BadRequest, naming the field, for a value out of range.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from zlm.config import PoolingSpec, Resolved
from zlm.errors import BadRequest, Internal, clip
from zlm.messages import Failed, Pool, Pooled
from zlm.offline import Answer
from zlm.offline_calls import Call, checked
from zlm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from zlm.pooling_params import PoolingParams
from zlm.prompts import Prompt, as_list, prompt_parts
from zlm.scores import Pairs, pooled_texts, scores

Out = TypeVar("Out")
Prompts = Prompt | Sequence[Prompt]


def embed(
    resolved: Resolved, prompts: Prompts, given: PoolingParams | None, truncate: int | None
) -> Call[Pool, EmbeddingRequestOutput]:
    """Return the call for the vector of each of *prompts*.

    Raises BadRequest, too, for a model that gives none.
    """
    pooling = resolved.spec.pooling or PoolingSpec()
    if pooling.kind == "tokens":
        raise BadRequest("this model gives something for each token: use encode, not embed")
    if pooling.num_labels:
        raise BadRequest("this model scores or classifies: use classify or score, not embed")
    return _call(prompts, _params(given, truncate, task="embed"), _embedding)


def encode(
    prompts: Prompts, given: PoolingParams | None, truncate: int | None, task: str | None
) -> Call[Pool, PoolingRequestOutput]:
    """Return the call for the pooled vector of each of *prompts*."""
    return _call(prompts, _params(given, truncate, raw=True, task=task), _raw)


def classify(
    resolved: Resolved, prompts: Prompts, given: PoolingParams | None, truncate: int | None
) -> Call[Pool, ClassificationRequestOutput]:
    """Return the call for the labels' probabilities; BadRequest if the model is no classifier."""
    pooling = resolved.spec.pooling
    if pooling is None or not pooling.num_labels:
        raise BadRequest("this model has no classification head: it cannot classify")
    if pooling.kind == "tokens":
        raise BadRequest("this model labels tokens, and no whole texts: use encode, not classify")
    labels = list(pooling.labels)
    params = _params(given, truncate, task="classify")
    return _call(prompts, params, lambda pooled: _classes(pooled, labels))


def score(
    resolved: Resolved,
    firsts: str | Sequence[str],
    seconds: str | Sequence[str],
    given: PoolingParams | None,
    truncate: int | None,
) -> Call[Pool, ScoringRequestOutput]:
    """Return the call for the scores of pairs of texts."""
    pairs = _Pairing(firsts, seconds, resolved)
    return Call(pairs.commands(_params(given, truncate)), lambda _, answers: pairs.outputs(answers))


def _call(
    prompts: Prompts, params: PoolingParams, output: Callable[[Pooled], Out]
) -> Call[Pool, Out]:
    forms = [prompt_parts(i, p) for i, p in enumerate(as_list(prompts))]
    inputs = [ids if ids is not None else text or "" for text, ids, _ in forms]
    commands = _commands(inputs, params)
    return Call(commands, lambda _, answers: [output(each) for each in _all_pooled(answers)])


def _params(
    given: PoolingParams | None,
    truncate_prompt_tokens: int | None,
    *,
    raw: bool = False,
    task: str | None = None,
) -> PoolingParams:
    """Return checked parameters; *raw*: nothing is done to vectors that *given* does not ask for.

    task: what the call is for.
    """
    params = checked(PoolingParams() if given is None else given, "pooling_params", PoolingParams)
    if task is not None:
        if params.task not in (None, task):
            raise BadRequest(f"task is {params.task}, but {task} was called for", param="task")
        params = msgspec.structs.replace(params, task=task)
    if truncate_prompt_tokens is not None:
        params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
    if raw:
        params = msgspec.structs.replace(
            params,
            normalize=bool(params.normalize),
            activation=bool(params.activation),
        )
    return checked(params, "pooling_params", PoolingParams)


def _commands(prompts: Sequence[str | list[int]], params: PoolingParams) -> list[Pool]:
    """Return a command for each of *prompts*, without its id and time."""
    return [Pool(0, 0.0, [prompt], params) for prompt in prompts]


def _all_pooled(answers: Sequence[Answer]) -> list[Pooled]:
    """Return *answers*; raise Internal if the engine could not compute one of them."""
    pooled = []
    for index, answer in enumerate(answers):
        if isinstance(answer, Failed):
            raise Internal(f"prompt {index}: {answer.message}")
        assert isinstance(answer, Pooled), "vectors were asked for"
        pooled.append(answer)
    return pooled


def _embedding(pooled: Pooled) -> EmbeddingRequestOutput:
    """Return the output of one input of ``embed``."""
    vector = EmbeddingOutput(_floats(pooled))
    return EmbeddingRequestOutput(str(pooled.request_id), pooled.prompts[0], vector)


def _raw(pooled: Pooled) -> PoolingRequestOutput:
    """Return the output of one input of ``encode``."""
    rows = len(pooled.prompts[0])
    values = np.frombuffer(pooled.vectors[0], "<f4")
    vector = PoolingOutput((values.reshape(rows, -1) if pooled.per_token else values).tolist())
    return PoolingRequestOutput(str(pooled.request_id), pooled.prompts[0], vector)


def _classes(pooled: Pooled, names: list[str]) -> ClassificationRequestOutput:
    """Return the output of one input of ``classify``."""
    probabilities = ClassificationOutput(_floats(pooled), names)
    return ClassificationRequestOutput(str(pooled.request_id), pooled.prompts[0], probabilities)


def _floats(pooled: Pooled) -> list[float]:
    values: list[float] = np.frombuffer(pooled.vectors[0], "<f4").tolist()
    return values


class _Pairing:
    """The pairs of one call of ``score``: each text is computed once, or each pair."""

    def __init__(
        self, firsts: str | Sequence[str], seconds: str | Sequence[str], resolved: Resolved
    ) -> None:
        """Raise BadRequest if the numbers of texts do not match, or the model gives no scores."""
        self._pooling = resolved.spec.pooling or PoolingSpec()
        names = ("data_1", "data_2")
        self._pairs = Pairs(_texts(names[0], firsts), _texts(names[1], seconds), names)
        ones, twos = len(self._pairs.firsts), len(self._pairs.seconds)
        if ones not in (1, twos):
            raise BadRequest(
                f"data_1 has {ones} texts and data_2 {twos}: give one for all, or as many",
                param="data_1",
            )
        self._texts = pooled_texts(self._pairs, self._pooling)

    def commands(self, params: PoolingParams) -> list[Pool]:
        """Return the commands, without their ids and times."""
        texts = self._texts
        return [
            msgspec.structs.replace(
                command, seconds=texts.seconds[i : i + 1], names=texts.names[i : i + 1]
            )
            for i, command in enumerate(_commands(texts.prompts, params))
        ]

    def outputs(self, given: Sequence[Answer]) -> list[ScoringRequestOutput]:
        """Return the score of each pair."""
        answers = _all_pooled(given)
        count = len(self._pairs.seconds)
        crossed = self._pooling.num_labels > 0
        vectors = [answer.vectors[0] for answer in answers]
        ids = [answer.prompts[0] for answer in answers]
        lengths = [len(each) for each in ids] if answers[0].per_token else None
        found = scores(vectors, count, is_cross_encoder=crossed, lengths=lengths)
        if not crossed:
            firsts = ids[:-count] * (count if len(ids) == count + 1 else 1)
            ids = [one + two for one, two in zip(firsts, ids[-count:], strict=True)]
        return [
            ScoringRequestOutput(str(answer.request_id), tokens, ScoringOutput(score))
            for answer, tokens, score in zip(answers[-count:], ids, found, strict=True)
        ]


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    texts = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not texts or not all(isinstance(text, str) for text in texts):
        message = f"{name} must be a text or a list of at least one"
        raise BadRequest(f"{message}, got {clip(repr(given))}", param=name)
    return texts
