"""Requests for vectors and scores: texts to ids, ids to the engine, its vectors back in one answer.

The tokenizer core's part for models that are pooled; like it, without sockets or clock. Owns the
open requests and their sequences. A request ends with one Pooled, when the last of its vectors has
come, or with the error of its first sequence that failed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zlm.config import PoolingSpec, Resolved
from zlm.engine.news import vectors_of
from zlm.errors import BadRequest, ZlmError
from zlm.messages import (
    ChatPrompt,
    Pool,
    Pooled,
    SamplingSpec,
    SequenceError,
    StepOutput,
    Submit,
)
from zlm.pooling_params import PoolingParams
from zlm.tokenizer.lengths import check_prompt
from zlm.tokenizer.sampling import check_ids, int32
from zlm.tokenizer.vocabulary import Vocabulary

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Input:
    """One sequence to be computed."""

    token_ids: list[int]
    second_segment: int = 0


@dataclass(slots=True)
class _Request:
    """What is open of one request."""

    params: PoolingParams
    per_token: bool
    prompts: list[list[int]]
    vectors: list[bytes | None]
    places: dict[int, int]  # sequence id → number of its prompt; only those still running
    times: tuple[float, float] | None = None  # as Pooled tells them


class PoolingRequests:
    """All open requests of one tokenizer for a model that is pooled."""

    def __init__(
        self,
        resolved: Resolved,
        pooling: PoolingSpec,
        first_seq_id: int,
        vocabulary: Vocabulary,
        *,
        submit: Callable[[Submit], None],
        answer: Callable[[Pooled], None],
        chat_ids: Callable[[ChatPrompt, int | None], list[int]],
    ) -> None:
        """*submit* sends to the engine, *answer* to the front end.

        Sequence ids are counted from *first_seq_id*. *chat_ids* renders and encodes a
        conversation; TooLong if it surely exceeds its second argument, a number of tokens.
        """
        self.max_sequence_tokens: int | None = None  # what the KV cache can hold, when known
        self._resolved = resolved
        self._pooling = pooling
        self._vocabulary = vocabulary
        self._submit = submit
        self._answer = answer
        self._chat_ids = chat_ids
        self._next_seq_id = first_seq_id
        self._requests: dict[int, _Request] = {}
        self._owners: dict[int, int] = {}  # sequence id → request id

    def __len__(self) -> int:
        return len(self._requests)

    def open_requests(self) -> list[int]:
        """Return the ids of all open requests."""
        return list(self._requests)

    # ------------------------------------------------------------------ in

    def start(self, message: Pool) -> None:
        """Check all inputs of *message*, then submit them; raises BadRequest or TooLong."""
        params = message.params
        params.check()
        per_token = self._per_token(params)
        self._check_dimensions(params.dimensions, per_token=per_token)
        if message.chat is None and not message.prompts:
            raise BadRequest("input must not be empty", param="input")
        inputs = self._inputs(message)
        first, self._next_seq_id = self._next_seq_id, self._next_seq_id + len(inputs)
        places = {first + number: number for number in range(len(inputs))}
        prompts = [each.token_ids for each in inputs]
        self._requests[message.request_id] = _Request(
            params, per_token, prompts, [None] * len(inputs), places
        )
        self._owners.update(dict.fromkeys(places, message.request_id))
        for seq_id, each in zip(places, inputs, strict=True):
            self._submit(
                Submit(
                    seq_id=seq_id,
                    arrival=message.arrival,
                    token_ids=int32(each.token_ids),
                    max_tokens=0,
                    sampling=SamplingSpec(seed=0),
                    ignore_eos=True,
                    priority=message.priority,
                    second_segment=each.second_segment,
                    pool_tokens=per_token,
                )
            )

    def forget(self, request_id: int) -> list[int]:
        """Drop a request and return its sequences that the engine still works on."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        for seq_id in request.places:
            del self._owners[seq_id]
        return sorted(request.places)

    def request_of(self, error: SequenceError) -> int | None:
        """Return the request that *error* ends, None if it is over."""
        return self._owners.get(error.seq_id)

    # ------------------------------------------------------------------ the engine's news

    def take(self, message: StepOutput) -> None:
        """Take in the vectors of a step; answer the requests that they complete."""
        if message.pooled is None:
            return
        seq_ids = np.frombuffer(message.seq_ids, np.int64)
        rows = np.frombuffer(message.pooled.rows, np.int32)
        times = {row: (started, known) for row, started, known in message.times}
        for row, values in zip(rows, vectors_of(message.pooled), strict=True):
            seq_id = int(seq_ids[row])
            request_id = self._owners.pop(seq_id, None)
            if request_id is None:
                continue
            request = self._requests[request_id]
            place = request.places.pop(seq_id)
            request.times = request.times or times.get(int(row))
            if request.per_token:
                values = values.reshape(len(request.prompts[place]), -1)
            request.vectors[place] = self._finished(values, request).tobytes()
            if not request.places:
                del self._requests[request_id]
                whole = [each for each in request.vectors if each is not None]
                prompts, per_token = request.prompts, request.per_token
                self._answer(Pooled(request_id, whole, prompts, per_token, request.times))

    def _finished(self, vector: Floats, request: _Request) -> Floats:
        """Return *vector* [N] or [L, N] as it was asked for: cut, of length 1, or probabilities."""
        pooling, params = self._pooling, request.params
        if pooling.num_labels:
            return vector if params.activation is False else activated(vector, pooling.activation)
        normalize = params.normalize
        if normalize is None:
            normalize = pooling.normalize and request.per_token == (pooling.kind == "tokens")
        if params.dimensions is not None:
            vector = vector[: params.dimensions]
        if normalize:
            vector = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), 1e-12)
        return vector.astype(np.float32)

    # ------------------------------------------------------------------ checks

    def _per_token(self, params: PoolingParams) -> bool:
        """Return whether a vector a token is wanted; raise if the model has not what is asked."""
        pooling, task = self._pooling, params.task
        scores, per_token = pooling.num_labels > 0, pooling.kind == "tokens"
        offered = "token_classify" if scores else "token_embed"
        if not per_token:
            offered = "classify" if scores else "embed, token_embed"
        if task is not None and task not in offered.split(", "):
            raise BadRequest(f"task {task}: this model offers {offered}", param="task")
        return per_token or task == "token_embed"

    def _check_dimensions(self, dimensions: int | None, *, per_token: bool) -> None:
        pooling, width = self._pooling, self._resolved.spec.output_size
        if dimensions is None or (dimensions == width and not (pooling.num_labels or per_token)):
            return
        if pooling.num_labels or per_token:
            what = "scores" if pooling.num_labels else "vectors of tokens"
            raise BadRequest(f"dimensions has no meaning for {what}", param="dimensions")
        if dimensions in pooling.dimensions:
            return
        least = pooling.least_dimensions
        if least and least <= dimensions <= width:
            return
        allowed = f"one of {', '.join(map(str, (*pooling.dimensions, width)))}"
        if least:
            allowed = f"between {least} and {width}"
        elif not pooling.dimensions:
            allowed = f"{width}, the model's own: it was not trained for shorter vectors"
        raise BadRequest(f"dimensions must be {allowed}, got {dimensions}", param="dimensions")

    def _inputs(self, message: Pool) -> list[_Input]:
        params, limit = message.params, self._resolved.max_model_len
        if self.max_sequence_tokens is not None:
            limit = min(limit, self.max_sequence_tokens)
        keep = params.truncate_prompt_tokens
        keep = limit if keep == -1 else keep
        if message.chat is not None:
            if params.prompt_name is not None:
                raise BadRequest("prompt_name: messages have no prompt", param="prompt_name")
            ids = self._chat_ids(message.chat, limit if keep is None else None)
            return [self._checked(_Input(ids[:keep]), limit, "messages")]
        prefix = self._prefix(params.prompt_name)
        inputs = []
        for number, prompt in enumerate(message.prompts):
            name = message.names[number] if message.names else "input"
            if message.seconds:
                each = self._pair(prompt, message.seconds[number], keep)
            elif isinstance(prompt, str):
                special = message.add_special_tokens
                if keep is None:
                    least = self._vocabulary.least_tokens(prefix + prompt)
                    check_prompt(least, limit, generate=False, at_least=True, param=name)
                each = _Input(self._text(prefix + prompt, special, keep))
            else:
                check_ids(name, prompt, self._resolved.spec.vocab_size)
                each = _Input(list(prompt) if keep is None else prompt[:keep])
            inputs.append(self._checked(each, limit, name, is_pair=bool(message.seconds)))
        return inputs

    def _checked(self, given: _Input, limit: int, param: str, *, is_pair: bool = False) -> _Input:
        """Return *given*; raise, naming *param*, if it is empty, too long, or holds a wrong id."""
        if not given.token_ids:
            raise BadRequest(f"{param} must not be empty: it has no tokens", param=param)
        what = f"{param} with its pair" if is_pair else param
        check_prompt(len(given.token_ids), limit, generate=False, param=param, what=what)
        check_ids(param, given.token_ids, self._resolved.spec.vocab_size)
        return given

    def _prefix(self, name: str | None) -> str:
        """Return the model's own prompt that precedes each text."""
        prompts = self._pooling.prompts
        if name is None:
            return prompts.get(self._pooling.default_prompt, "")
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise BadRequest(
                f"prompt_name: the model has no prompt of this name; it has: {known}",
                param="prompt_name",
            )
        return prompts[name]

    def _text(self, text: str, special: bool, keep: int | None) -> list[int]:
        vocabulary = self._vocabulary
        ids = vocabulary.encode(text, add_special_tokens=special)
        if keep is None or len(ids) <= keep:
            return ids
        return vocabulary.encode_cut(text, keep, add_special_tokens=special)

    def _pair(self, first: str | list[int], second: str, keep: int | None) -> _Input:
        """Return a cross-encoder's input: two texts with what stands between them."""
        if not isinstance(first, str):
            raise BadRequest("a pair is made of two texts, not of token ids", param="input")
        ids, types = self._vocabulary.encode_pair(first, second, keep)
        begins = types.index(1) if 1 in types and self._resolved.spec.token_types > 1 else 0
        return _Input(ids, begins)


def activated(logits: Floats, name: str) -> Floats:
    """Return *logits* [..., N] after the function *name*: sigmoid, softmax or identity."""
    wide = logits.astype(np.float64)
    if name == "softmax":
        powers = np.exp(wide - wide.max(-1, keepdims=True))
        wide = powers / powers.sum(-1, keepdims=True)
    elif name == "sigmoid":
        wide = 0.5 * (1.0 + np.tanh(0.5 * wide))
    return wide.astype(np.float32)


def unserved(generates: bool) -> ZlmError:
    """Return the error for a request of the kind that this model does not serve."""
    if generates:
        return BadRequest(
            "this model generates text: it gives no embeddings or scores. To make an embedding "
            'model of it: LLM(..., runner="pooling"), or zlm serve --runner pooling',
            code="model_not_supported",
        )
    return BadRequest(
        "this model gives embeddings or scores: it generates no text", code="model_not_supported"
    )
