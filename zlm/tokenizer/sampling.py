"""From a client's SamplingParams to the SamplingSpec that the engine works by.

Fills in the model's defaults, normalises, and checks every token id against the model's vocabulary.
Owns the source of seeds for requests that bring none.
"""

import hashlib
import random
from array import array
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from zlm.config import ModelSpec
from zlm.errors import BadRequest, clip
from zlm.messages import SamplingSpec
from zlm.sampling_params import GREEDY_BELOW, SamplingParams

if TYPE_CHECKING:  # the front end names ids as this module does, and loads no tokenizer
    from zlm.tokenizer.vocabulary import Vocabulary

_TWO_64 = 1 << 64


class SeedSource:
    """Gives every prompt without a seed one: fresh randomness, or a series fixed by ``--seed``."""

    def __init__(self, seed: int | None, owner: int) -> None:
        """*owner* sets apart the series of several tokenizer processes."""
        self._fixed = None if seed is None else f"{seed}:{owner}"
        self._random = random.SystemRandom()
        self._count = 0

    def next(self) -> int:
        """Return an unsigned 64-bit seed."""
        if self._fixed is None:
            return self._random.getrandbits(64)
        self._count += 1
        digest = hashlib.blake2b(f"{self._fixed}:{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def int32(values: Iterable[int]) -> bytes:
    """Return *values* as a column of little-endian int32."""
    return array("i", values).tobytes()


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise BadRequest, naming the field and the limit, for an id out of the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    raise out_of_vocabulary(name, ids, vocab_size)


def out_of_vocabulary(name: str, ids: Collection[int], vocab_size: int) -> BadRequest:
    """Return the error for the first of *ids* that is out of the vocabulary."""
    token_id = next(i for i in ids if not 0 <= i < vocab_size)
    return BadRequest(
        f"{name} has token id {clip(token_id)}, which is out of vocabulary: "
        f"ids of this model are 0 to {vocab_size - 1}",
        param=name,
    )


def sampling_spec(
    params: SamplingParams,
    spec: ModelSpec,
    vocabulary: "Vocabulary",
    *,
    prompt_logprobs: int | None,
) -> SamplingSpec:
    """Return the spec that *params* means, with seed 0.

    *prompt_logprobs* is what the engine must report of the prompt. Raises BadRequest for ids out
    of the vocabulary.
    """
    bias = params.logit_bias or {}
    allowed = params.allowed_token_ids or ()
    stop_ids = params.stop_token_ids or []
    check_ids("logit_bias", bias, spec.vocab_size)
    check_ids("allowed_token_ids", allowed, spec.vocab_size)
    check_ids("stop_token_ids", stop_ids, spec.vocab_size)
    banned = sorted({*spec.eos_token_ids, *stop_ids}) if params.min_tokens else []
    temperature, top_p, top_k, min_p, repetition_penalty = _shaping(params, spec)
    return SamplingSpec(
        seed=0,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if prompt_logprobs is None else prompt_logprobs,
        min_tokens=params.min_tokens,
        banned_until_min=int32(i for i in banned if i < spec.vocab_size),
        bias_ids=int32(bias),
        bias_values=array("f", bias.values()).tobytes(),
        allowed_ids=int32(sorted(set(allowed))),
        bad_words=[int32(word) for word in _bad_words(params.bad_words or [], vocabulary)],
    )


def _shaping(params: SamplingParams, spec: ModelSpec) -> tuple[float, float, int, float, float]:
    """Return temperature, top_p, top_k, min_p and repetition_penalty.

    What the request says wins over the checkpoint's default, which wins over the neutral value.
    Greedy has no use for the three in the middle; top_p 0 keeps the best token, as top_k 1 does.
    """
    default = spec.generation
    temperature = _first(params.temperature, default.temperature, 1.0)
    penalty = _first(params.repetition_penalty, default.repetition_penalty, 1.0)
    if temperature < GREEDY_BELOW:
        return 0.0, 1.0, 0, 0.0, penalty
    top_p = _first(params.top_p, default.top_p, 1.0)
    top_k = int(_first(params.top_k, default.top_k, 0))
    min_p = _first(params.min_p, default.min_p, 0.0)
    if top_p == 0.0:
        return temperature, 1.0, 1, 0.0, penalty
    return temperature, top_p, max(top_k, 0), min_p, penalty


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _bad_words(words: list[str], vocabulary: "Vocabulary") -> list[list[int]]:
    """Return the token sequences of *words*, each as it stands within a word and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (word, bare, f" {bare}") if bare else (word,):
            ids = tuple(vocabulary.encode_inside(text))
            if ids:
                found[ids] = None
    return [list(ids) for ids in found]


def unsigned_seed(seed: int) -> int:
    """Return a signed 64-bit *seed* as the unsigned one of the same bits."""
    return seed % _TWO_64
