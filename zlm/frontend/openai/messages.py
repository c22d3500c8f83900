"""The messages of a conversation: checked, and in the one form the chat template gets.

Keys we do not know are passed on to the template as they are. Pure.
"""

from typing import Any

from zlm.errors import BadRequest, clip
from zlm.frontend.openai.body import check_depth

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MAY_LACK_CONTENT = ("assistant",)


def conversation(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return *messages* with each content a string or a list of text parts.

    Raises BadRequest, naming the message, for what is missing, of a wrong type, or not text.
    """
    if messages is None:
        raise BadRequest("messages is required", param="messages")
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    for key, value in message.items():
        if isinstance(value, (dict, list)):
            check_depth(value, f"{where}.{clip(key)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role must be a string, got {clip(role)}", param=f"{where}.role")
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
        param = f"{where}.tool_calls"
        raise BadRequest(f"{param} must be a list, got {clip(calls)}", param=param)
    for i, call in enumerate(calls):
        param = f"{where}.tool_calls[{i}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{param} must be an object with a name", param=param)
        arguments = function.get("arguments")
        if not isinstance(arguments, (str, dict, type(None))):
            param = f"{param}.arguments"
            message_text = f"{param} must be a string of JSON, got {clip(arguments)}"
            raise BadRequest(message_text, param=param)
    return message


def _content(content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
    if content is None:
        if role in _MAY_LACK_CONTENT:
            return ""
        raise BadRequest(f"{where} is required", param=where)
    if not isinstance(content, list):
        message = f"{where} must be a string or a list of parts, got {clip(content)}"
        raise BadRequest(message, param=where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise BadRequest(f"{where} must be a text part, got {clip(part)}", param=where)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        message = f"{where} is of type {clip(kind)}: this model takes text parts only"
        raise BadRequest(message, param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        name = f"{where}.{_TEXT_PARTS[kind]}"
        raise BadRequest(f"{name} must be a string, got {clip(text)}", param=name)
    return {"type": "text", "text": text}
