"""POST /v1/chat/completions: the request, and the form of its answer."""

from typing import Any

from zlm.config import Resolved
from zlm.errors import BadRequest, clip
from zlm.frontend.openai import fields, logprobs
from zlm.frontend.openai.answer import AnswerHead
from zlm.frontend.openai.body import BodyDecoder, check_depth, mistyped
from zlm.frontend.openai.messages import ConversationFields, conversation, strict_keys
from zlm.frontend.openai.tools import tool_request
from zlm.messages import ChatPrompt, Delta, Generate, ToolCallDelta
from zlm.sampling_params import SamplingParams

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"
ROLE = "assistant"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatRequest(fields.CommonFields, kw_only=True):
    """The body."""

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None  # go to the template
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None  # goes to the template
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # false: thoughts are left out of the answer
    # Accepted, change nothing here.
    prediction: dict[str, Any] | None = None
    # Refused when they ask for something.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    mm_processor_kwargs: Any = None


decoder = BodyDecoder(ChatRequest)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "mm_processor_kwargs": ({},),
}


def generate(
    request: ChatRequest, resolved: Resolved, *, request_id: int, arrival: float
) -> Generate:
    """Return the command for the tokenizer; raise BadRequest for what cannot be done.

    *arrival* is ``time.monotonic()`` when the request was complete.
    """
    fields.refuse_unsupported(request)
    fields.refuse(request, NEUTRAL)
    tools = tool_request(
        request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False
    )
    if request.reasoning_effort not in (None, *EFFORTS):
        wanted = f"one of {', '.join(EFFORTS)}"
        raise mistyped("reasoning_effort", wanted, request.reasoning_effort)
    max_tokens, name = request.max_tokens, "max_tokens"
    if request.max_completion_tokens is not None:
        max_tokens, name = request.max_completion_tokens, "max_completion_tokens"
    if max_tokens is not None and max_tokens < 1 and not (max_tokens == 0 and request.echo):
        message = f"{name} must be at least 1 (0 only with echo: true), got {clip(max_tokens)}"
        raise BadRequest(message, param=name)
    return Generate(
        request_id=request_id,
        arrival=arrival,
        prompts=[],
        chat=chat_prompt(
            request,
            strict=is_strict(resolved),
            tools=tools.tools,
            documents=request.documents,
            reasoning_effort=request.reasoning_effort,
        ),
        params=_sampling_params(request, resolved, max_tokens, name),
        stream=request.wants_stream(),
        echo=bool(request.echo),
        return_token_ids=bool(request.return_token_ids),
        priority=fields.priority(request.priority),
        cache_salt=fields.cache_salt(request),
        split_reasoning=True,
        drop_reasoning=request.include_reasoning is False,
        tools=tools.options,
        grammar=tools.grammar,
        max_tokens_field=name,
    )


def _sampling_params(
    request: ChatRequest, resolved: Resolved, max_tokens: int | None, name: str
) -> SamplingParams:
    """Return the checked parameters; *name* is what errors call *max_tokens*."""
    server = resolved.config.server
    logprobs = _num_logprobs(request, server.limits.sampling.max_logprobs)
    try:
        return fields.sampling_params(request, server, max_tokens=max_tokens, logprobs=logprobs)
    except BadRequest as error:
        if name != "max_tokens" and "max_tokens" in error.message:
            param = name if error.param == "max_tokens" else error.param
            raise BadRequest(error.message.replace("max_tokens", name), param=param) from None
        raise


def is_strict(resolved: Resolved) -> bool:
    """Return whether keys and roles of messages that no template reads are refused."""
    return resolved.config.server.unknown_fields != "ignore"


def chat_prompt(
    request: ConversationFields,
    *,
    strict: bool,
    begin_turn: bool = True,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    reasoning_effort: str | None = None,
) -> ChatPrompt:
    """Return the conversation and how it is to be rendered; *strict*: see ``is_strict``.

    *begin_turn*: an answer's turn is begun after it if *request* does not say.
    """
    begins = request.add_generation_prompt
    continues = bool(request.continue_final_message)
    if continues and begins:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise BadRequest(message, param="continue_final_message")
    if strict:
        strict_keys(request.messages or [])
    messages = conversation(request.messages)
    kwargs = request.chat_template_kwargs
    check_depth(kwargs, "chat_template_kwargs")
    check_depth(documents, "documents")
    if reasoning_effort is not None:
        kwargs = {"reasoning_effort": reasoning_effort, **(kwargs or {})}
    return ChatPrompt(
        messages=messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=not continues and (begin_turn if begins is None else begins),
        continue_final_message=continues,
        chat_template=request.chat_template,
        template_kwargs=kwargs,
        add_special_tokens=bool(request.add_special_tokens),
    )


def _reasoning(delta: Delta) -> dict[str, Any]:
    """Return the thoughts, under both names that clients read."""
    if not delta.reasoning:
        return {}
    return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    """Return a whole call as it stands in a message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_chunk(call: ToolCallDelta) -> dict[str, Any]:
    """Return a piece of a call as it stands in a stream: the first one has id, type and name."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}


def _num_logprobs(request: ChatRequest, most: int) -> int | None:
    """Return how many alternatives, *most* at most, are asked for; None: no log-probabilities."""
    if request.logprobs:
        top = request.top_logprobs or 0
        if not 0 <= top <= most:
            message = f"top_logprobs must be between 0 and {most}, got {clip(top)}"
            raise BadRequest(message, param="top_logprobs")
        return top
    if request.top_logprobs is not None:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class ChatForm:
    """How deltas become chat choices."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        self._head = AnswerHead.new("chatcmpl", model)
        self.id = self._head.id
        self._as_ids = bool(request.return_tokens_as_token_ids)

    def chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"role": ROLE} if first else {}
        parts = _reasoning(delta)
        if delta.tool_calls:
            parts["tool_calls"] = [_call_chunk(call) for call in delta.tool_calls]
        if delta.text or first:
            content["content"] = delta.text or (None if parts else "")
        content |= parts
        body = self._chunk([self._choice(delta, "delta", content)])
        return self._with_prompt(body, delta)

    def text_chunk(self, index: int, text: str) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        return self._chunk([choice])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage}

    def answer(self, deltas: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for delta in deltas:
            parts = _reasoning(delta)
            if delta.tool_calls:
                parts["tool_calls"] = [_call(call) for call in delta.tool_calls]
            text = None if parts and not delta.text else delta.text
            message = {"role": ROLE, "content": text, "refusal": None, **parts}
            choices.append(self._choice(delta, "message", message))
        body = self._head.fields(KIND) | {"choices": choices, "usage": usage}
        return self._with_prompt(body, deltas[0])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head.fields(CHUNK_KIND) | {"choices": choices}

    def _choice(self, delta: Delta, name: str, content: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            name: content,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.logprobs is not None:
            choice["logprobs"] = logprobs.chat_shape(delta.logprobs, as_ids=self._as_ids)
        if delta.token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice

    @staticmethod
    def _with_prompt(body: dict[str, Any], delta: Delta) -> dict[str, Any]:
        """Add what *delta* tells of the prompt, which all choices of a chat share."""
        if delta.prompt_token_ids is not None:
            body["prompt_token_ids"] = delta.prompt_token_ids
        if delta.prompt_logprobs is not None:
            body["prompt_logprobs"] = logprobs.prompt_shape(delta.prompt_logprobs)
        return body
