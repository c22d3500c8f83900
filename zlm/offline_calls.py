"""What a call of ``LLM`` or ``AsyncLLM`` asks of the engine, and what its caller gets back.

Pure: prompts of every form and their parameters, checked, become ``Generate`` messages; how they
are sent and waited for is the business of the class that was called. The calls of models that give
vectors are in ``zlm.offline_pooling``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

import msgspec

from zlm.config import Resolved
from zlm.errors import BadRequest, ZlmError, clip
from zlm.frontend.openai.body import located
from zlm.frontend.openai.messages import conversation, strict_keys
from zlm.messages import ChatPrompt, Generate, Pool
from zlm.offline import Answer, OfflineEngine
from zlm.offline_options import check_keywords
from zlm.offline_text import TextAnswer
from zlm.outputs import RequestOutput
from zlm.pooling_params import PoolingParams
from zlm.prompts import ChatMessage, Prompt, as_list, conversations, prompt_parts
from zlm.sampling_params import (
    MAX_SEED,
    MIN_SEED,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)

T = TypeVar("T")
P = TypeVar("P", SamplingParams, BeamSearchParams, PoolingParams)
Asked = TypeVar("Asked", Generate, Pool)
Out = TypeVar("Out")
Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None


class ChatOptions(TypedDict, total=False):
    """How a conversation is made a prompt.

    The prompt is what the model's chat template makes of it, or ``chat_template`` (the template
    itself). With ``continue_final_message`` the last message is continued instead of answered
    (then ``add_generation_prompt`` must be False).
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Call(Generic[Asked, Out]):
    """``requests`` have no ids and times yet; ``outputs`` makes of their answers what is wanted."""

    requests: list[Asked]
    outputs: Callable[[list[Asked], list[Answer]], list[Out]]


@dataclass(frozen=True, slots=True)
class TextCall:
    """A call whose answers are texts. ``texts`` are the prompts where they were given as text."""

    requests: list[Generate]
    texts: list[str | None]

    def answer(self, index: int, request: Generate, engine: OfflineEngine) -> TextAnswer:
        """Return what gathers the answer to the request number *index*."""
        return TextAnswer(request, self.texts[index], engine.detokenize)

    def of(self, engine: OfflineEngine) -> Call[Generate, RequestOutput]:
        """Return the call with whole answers."""

        def outputs(requests: list[Generate], answers: list[Answer]) -> list[RequestOutput]:
            made = []
            for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                gathering = self.answer(index, request, engine)
                for news in answer if isinstance(answer, list) else [answer]:
                    gathering.take(news)
                made.append(gathering.whole())
            return made

        return Call(self.requests, outputs)


def generate(
    resolved: Resolved, prompts: Prompt | Sequence[Prompt], params: Params, priority: Priority
) -> TextCall:
    """Return the call that continues *prompts*."""
    forms = [prompt_parts(i, p) for i, p in enumerate(as_list(prompts))]
    requests = [
        {"prompts": [ids if ids is not None else text or ""], "cache_salt": salt}
        for text, ids, salt in forms
    ]
    return _texts(resolved, requests, [text for text, _, _ in forms], params, priority)


def chat(
    resolved: Resolved,
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
    params: Params,
    priority: Priority,
    options: ChatOptions,
) -> TextCall:
    """Return the call that answers one conversation or several.

    Raises TypeError for an option that there is not.
    """
    check_keywords("chat", options, ChatOptions)
    try:
        msgspec.convert(options, ChatOptions)
    except msgspec.ValidationError as error:
        field, problem = located(str(error))
        raise BadRequest(f"{field}: {problem}", param=field) from error
    continues = options.get("continue_final_message", False)
    generates = options.get("add_generation_prompt", True)
    if continues and generates:
        raise BadRequest(
            "continue_final_message needs add_generation_prompt=False",
            param="continue_final_message",
        )
    requests = [
        {
            "prompts": [],
            "chat": ChatPrompt(
                messages=_conversation(i, each),
                tools=options.get("tools"),
                add_generation_prompt=generates,
                continue_final_message=continues,
                chat_template=options.get("chat_template"),
                template_kwargs=options.get("chat_template_kwargs"),
            ),
        }
        for i, each in enumerate(conversations(messages))
    ]
    return _texts(resolved, requests, [None] * len(requests), params, priority)


def _texts(
    resolved: Resolved,
    requests: list[dict[str, Any]],
    texts: list[str | None],
    params: Params,
    priority: Priority,
) -> TextCall:
    count = len(requests)
    given = default_params(resolved) if params is None else params
    if isinstance(given, Sequence):
        each = _one_each("sampling_params", given, count)
        every = [checked(p, f"sampling_params[{i}]", SamplingParams) for i, p in enumerate(each)]
    else:
        every = [checked(given, "sampling_params", SamplingParams)] * count
    priorities = priority if isinstance(priority, Sequence) else [priority or 0] * count
    for n in _one_each("priority", priorities, count):
        if not (isinstance(n, int) and MIN_SEED <= n <= MAX_SEED):
            message = f"priority must be a signed 64-bit integer, got {clip(repr(n))}"
            raise BadRequest(message, param="priority")
    generates = [
        Generate(0, 0.0, params=p, return_token_ids=True, priority=n, **request)
        for request, p, n in zip(requests, every, priorities, strict=True)
    ]
    return TextCall(generates, texts)


def streamed(request: Generate) -> Generate:
    """Return *request* as one that is told of as it comes, unless only its end is wanted."""
    is_whole = request.params.output_kind is RequestOutputKind.FINAL_ONLY
    return msgspec.structs.replace(request, stream=not is_whole)


def default_params(resolved: Resolved) -> SamplingParams:
    """Return the model's defaults: its generation_config.json."""
    defaults = resolved.spec.generation
    return SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        max_tokens=defaults.max_new_tokens or 16,
    )


def checked(params: object, where: str, kind: type[P]) -> P:
    """Return a checked copy of *params*; raise BadRequest, saying *where*, if it is wrong."""
    if not isinstance(params, kind):
        message = f"{where} must be {kind.__name__}, got {clip(repr(params))}"
        raise BadRequest(message, param=where)
    try:
        copy = msgspec.convert(msgspec.to_builtins(params), kind)
        copy.check()
    except (TypeError, msgspec.ValidationError) as error:
        cause = error.__cause__  # of a copy that was refused as it was made
        if isinstance(cause, ZlmError):
            raise BadRequest(f"{where}: {cause.message}", param=cause.param) from error
        field, problem = located(str(error))
        message = ": ".join(filter(None, (where, field, problem)))
        raise BadRequest(message, param=field or where) from error
    except ZlmError as error:
        raise BadRequest(f"{where}: {error.message}", param=error.param) from error
    return copy


def _one_each(name: str, values: Sequence[T], count: int) -> Sequence[T]:
    if len(values) != count:
        message = f"{name} has {len(values)} entries for {count} prompts"
        raise BadRequest(message, param=name)
    return values


def _conversation(index: int, messages: Any) -> list[ChatMessage]:
    """Return conversation number *index* in the template's form, checked as a server does."""
    where = f"conversation {index}: "
    is_list = isinstance(messages, Sequence) and all(isinstance(m, Mapping) for m in messages)
    if isinstance(messages, str) or not is_list:
        message = f"{where}must be a list of messages, dicts with role and content"
        raise BadRequest(f"{message}, got {clip(repr(messages))}", param="messages")
    given = [dict(message) for message in messages]
    try:
        strict_keys(given)
        return conversation(given)
    except BadRequest as error:
        raise BadRequest(where + error.message, param=error.param, code=error.code) from error
