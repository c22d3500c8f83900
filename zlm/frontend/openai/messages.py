"""The messages of a conversation: checked, and in the one form the chat template gets.

Keys and roles that no template is known to read are refused, as unknown fields are; with
``--unknown-fields ignore`` all are passed on to the template as they are. Pure.
"""

import difflib
from typing import Any, Protocol

from zlm.errors import BadRequest, clip
from zlm.frontend.openai.body import check_depth, mistyped

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MAY_LACK_CONTENT = ("assistant",)
OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROLES = (  # and those that chat templates know besides
    *OPENAI_ROLES,
    *("model", "ipython", "environment", "observation", "context", "document", "documents"),
    *("tools", "available_tools", "tool_response", "tool_result", "control", "thinking"),
)
KEYS = (  # of OpenAI's requests, of answers that clients send back, and those that templates read
    *("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "id"),
    *("function_call", "annotations", "reasoning_content", "reasoning", "reasoning_details"),
    *("thinking", "thoughts", "tools", "documents", "prefix", "partial", "tool_plan", "citations"),
    *("recipient", "channel", "content_type", "cache_control", "metadata", "weight", "parsed"),
    *("provider_specific_fields", "thinking_blocks", "extra_content", "type", "status", "end_turn"),
)


class ConversationFields(Protocol):
    """A request with a conversation, and how its template is to be rendered."""

    messages: list[dict[str, Any]] | None
    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


def conversation(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return *messages* with each content a string or a list of text parts.

    Raises BadRequest, naming the message, for what is missing, of a wrong type, or not text.
    """
    if messages is None:
        raise BadRequest("messages is required", param="messages")
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def strict_keys(messages: list[dict[str, Any]]) -> None:
    """Raise BadRequest, naming it, for a key or a role that no template is known to read."""
    for i, message in enumerate(messages):
        for key in message:
            if key not in KEYS:
                text = f"unknown field {clip(key)!r} in messages[{i}]{_nearest(clip(key), KEYS)}"
                raise BadRequest(text, param=f"messages[{i}].{clip(key)}", code="unknown_field")
        role = message.get("role")
        if isinstance(role, str) and role and role not in ROLES:
            known, param = ", ".join(OPENAI_ROLES), f"messages[{i}].role"
            text = f"{param} must be one of {known}, got {clip(role)!r}{_nearest(role, ROLES)}"
            raise BadRequest(text, param=param)


def _nearest(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word[:64], known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    for key, value in message.items():
        if isinstance(value, (dict, list)):
            check_depth(value, f"{where}.{clip(key)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise mistyped(f"{where}.role", "a string", role)
    if "tool_calls" in message:
        message = _with_calls(message, where)
    content = message.get("content")
    if isinstance(content, str):
        return message
    return {**message, "content": _content(content, role, f"{where}.content")}


def _with_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return *message* with its calls checked; without them if there is none."""
    calls = message["tool_calls"]
    if not calls and (calls is None or isinstance(calls, list)):
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        raise mistyped(f"{where}.tool_calls", "a list", calls)
    for i, call in enumerate(calls):
        param = f"{where}.tool_calls[{i}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{param} must be an object with a name", param=param)
        arguments = function.get("arguments")
        if not isinstance(arguments, (str, dict, type(None))):
            raise mistyped(f"{param}.arguments", "a string of JSON", arguments)
    return message


def _content(content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
    if content is None and role in _MAY_LACK_CONTENT:
        return ""
    if not isinstance(content, list):
        raise mistyped(where, "a string or a list of parts", content)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise mistyped(where, "a text part", part)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        message = f"{where} is of type {clip(repr(kind))}: this model takes text parts only"
        raise BadRequest(message, param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise mistyped(f"{where}.{_TEXT_PARTS[kind]}", "a string", text)
    return {"type": "text", "text": text}
