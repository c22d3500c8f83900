"""POST /v1/completions: the request, and the form of its answer."""

from typing import Any

from zlm.config import Resolved
from zlm.errors import BadRequest
from zlm.frontend.openai import fields, logprobs
from zlm.frontend.openai.answer import AnswerHead
from zlm.frontend.openai.body import BodyDecoder
from zlm.messages import Delta, Generate

DEFAULT_MAX_TOKENS = 16
KIND = "text_completion"


class CompletionRequest(fields.CommonFields, kw_only=True):
    """The body. The shapes of ``prompt`` that this type lets through wrongly are checked later."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    # Refused when they ask for something.
    suffix: Any = None
    prompt_embeds: Any = None


decoder = BodyDecoder(CompletionRequest)
NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",), "prompt_embeds": ()}


def generate(
    request: CompletionRequest, resolved: Resolved, *, request_id: int, arrival: float
) -> Generate:
    """Return the command for the tokenizer; raise BadRequest for what cannot be done.

    *arrival* is ``time.monotonic()`` when the request was complete.
    """
    fields.refuse_unsupported(request)
    fields.refuse(request, NEUTRAL)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise BadRequest("max_tokens 0 makes sense only with echo: true", param="max_tokens")
    server = resolved.config.server
    prompts = prompts_of(request.prompt, server.limits.max_prompts)
    return Generate(
        request_id=request_id,
        arrival=arrival,
        prompts=prompts,
        params=fields.sampling_params(
            request, server, max_tokens=max_tokens, logprobs=request.logprobs
        ),
        stream=request.wants_stream(),
        echo=bool(request.echo),
        add_special_tokens=request.add_special_tokens is not False,
        return_token_ids=bool(request.return_token_ids),
        priority=fields.priority(request.priority),
        cache_salt=fields.cache_salt(request),
    )


def prompts_of(
    prompt: str | list[str | int | list[int]] | None, most: int
) -> list[str | list[int]]:
    """Return *prompt*, given in any of its four shapes, as a list of prompts."""
    if prompt is None:
        raise BadRequest("prompt is required", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not prompt or (kinds == {list} and not all(prompt)):
        raise BadRequest("prompt must not be an empty list", param="prompt")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(kinds) > 1:
        message = "prompt must be a string, a list of strings, of token ids, or of lists of them"
        raise BadRequest(f"{message}, not a mixture", param="prompt")
    if len(prompt) > most:
        message = f"prompt has {len(prompt)} prompts, the limit is {most}"
        raise BadRequest(message, param="prompt")
    return prompt  # type: ignore[return-value]


class CompletionForm:
    """How deltas become completion choices."""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._head = AnswerHead.new("cmpl", model)
        self.id = self._head.id
        self._alternatives = request.logprobs or 0
        self._as_ids = bool(request.return_tokens_as_token_ids)

    def chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        return self._body([self._choice(delta)])

    def text_chunk(self, index: int, text: str) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        return self._body([choice])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._body([]) | {"usage": usage}

    def answer(self, deltas: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        return self._body([self._choice(delta) for delta in deltas]) | {"usage": usage}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head.fields(KIND) | {"choices": choices}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.logprobs is not None:
            choice["logprobs"] = logprobs.completion_shape(
                delta.logprobs,
                alternatives=self._alternatives,
                offsets=delta.text_offsets,
                as_ids=self._as_ids,
            )
        if delta.token_ids is not None:
            choice["token_ids"] = delta.token_ids
        if delta.prompt_token_ids is not None:
            choice["prompt_token_ids"] = delta.prompt_token_ids
        if delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.prompt_shape(delta.prompt_logprobs)
        return choice
