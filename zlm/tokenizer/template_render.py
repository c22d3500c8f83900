"""Renders one conversation with one chat template: what both in-process and apart rendering do.

Prepares messages for the form the template takes, renders, and cuts the text where a final message
is to be continued. Pure but for the clock of the deadline. Special tokens and ids are the business
of ``chat_template``.
"""

import json
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError

from zlm.errors import BadRequest, clip
from zlm.tokenizer.template_calls import ArgumentsForm, arguments_form
from zlm.tokenizer.template_content import ContentForm, content_form
from zlm.tokenizer.template_environment import (
    ENVIRONMENT,
    TemplateTimeout,
    compile_template,
    parse_template,
)
from zlm.tokenizer.template_tools import knows_tools, write_tools

_REASONING = ("reasoning_content", "thinking", "reasoning")


class Conversation(msgspec.Struct, frozen=True):
    """All that goes into one rendering. Plain data, so that it can be sent to a process apart.

    variables: further names the template sees (special tokens, template_kwargs).
    end_mark: a character found nowhere in the conversation; marks the end of a final message that
    is to be continued, empty if none is.
    """

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: dict[str, Any]
    end_mark: str
    seconds: float


def render(conversation: Conversation) -> str:
    """Return the text of *conversation*.

    Raises BadRequest with the template's own words when it refuses or fails, when it is not a
    template, when the final message cannot be continued, and when it takes too long.
    """
    try:
        template = compile_template(conversation.template)
        messages = _prepare(conversation, _forms_of(conversation.template))
        variables = {
            **conversation.variables,
            "messages": messages,
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        text = ENVIRONMENT.run(template, variables, conversation.seconds)
    except BadRequest:
        raise
    except TemplateSyntaxError as error:
        message = f"the chat template is not valid: {error.message} (line {error.lineno})"
        raise BadRequest(clip(message), param="chat_template") from error
    except TemplateTimeout as error:
        message = f"the chat template took longer than {conversation.seconds:g} seconds"
        raise BadRequest(message, param="messages") from error
    except TemplateError as error:
        message = error.message or "the chat template refused the conversation"
        if type(error) is not TemplateError:  # not raise_exception's, but a fault found by Jinja
            message = f"the chat template failed: {message}"
        raise BadRequest(clip(message), param="messages") from error
    except Exception as error:  # whatever a template does wrong with what it was given
        message = f"the chat template failed: {type(error).__name__}: {error}"
        raise BadRequest(clip(message), param="messages") from error
    return _cut(text, conversation.end_mark) if conversation.end_mark else text


@lru_cache(maxsize=32)
def _forms_of(template: str) -> tuple[ContentForm, ArgumentsForm]:
    tree = parse_template(template)
    return content_form(tree), arguments_form(tree)


def _prepare(
    conversation: Conversation, forms: tuple[ContentForm, ArgumentsForm]
) -> list[dict[str, Any]]:
    messages = conversation.messages
    uses_tools = conversation.tools or any(message.get("tool_calls") for message in messages)
    if uses_tools and not knows_tools(conversation.template):
        messages = write_tools(messages, conversation.tools)
    messages = [_message(message, *forms) for message in messages]
    _name_results(messages)
    if conversation.end_mark:
        if not messages:
            raise BadRequest("messages must not be empty to be continued", param="messages")
        _mark_end(messages[-1], conversation.end_mark)
    return messages


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Give each result of a tool the name of the function that was called, if it has none."""
    names: dict[str, Any] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(call.get("id"), str):
                names[call["id"]] = function.get("name")
        call_id = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(call_id, str) and names.get(call_id):
            message.setdefault("name", names[call_id])


def _message(
    message: dict[str, Any], form: ContentForm, arguments: ArgumentsForm
) -> dict[str, Any]:
    """Return *message* as templates expect it: no nulls, content in the right form.

    A missing content becomes the empty string, arguments of tool calls get the form the template
    takes, and reasoning stands under the name templates read.
    """
    prepared = {key: value for key, value in message.items() if value is not None}
    prepared["content"] = _content(prepared.get("content", ""), form)
    reasoning = next((prepared[name] for name in _REASONING if name in prepared), None)
    if reasoning is not None:
        prepared.setdefault("thinking", reasoning)
        prepared["reasoning_content"] = reasoning
    calls = prepared.get("tool_calls")
    if isinstance(calls, list):
        prepared["tool_calls"] = [_tool_call(call, arguments) for call in calls]
    return prepared


def _content(content: Any, form: ContentForm) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form == "list" else content
    if not isinstance(content, list):
        message = f"content must be a string or a list of parts, got {clip(content)}"
        raise BadRequest(message, param="messages")
    if form == "string":
        return "\n".join(_part_text(part) for part in content)
    return [{"type": "text", "text": p} if isinstance(p, str) else dict(p) for p in content]


def _part_text(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        message = f"content part {clip(part)} has no text, and this model takes only text"
        raise BadRequest(message, param="messages")
    return text


def _tool_call(call: Any, form: ArgumentsForm) -> Any:
    """Return *call* with its arguments as an object, or as the JSON of one; any other as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments: Any = function.get("arguments")
    if form == "string":
        if not isinstance(arguments, dict):
            return call
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
        if not isinstance(arguments, dict):
            return call
    else:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(message: dict[str, Any], mark: str) -> None:
    # The space behind the mark tells whether the template trims what it is given.
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{content}{mark} "
        return
    for part in reversed(content):
        if isinstance(part.get("text"), str):
            part["text"] = f"{part['text']}{mark} "
            return
    raise BadRequest("the final message has no text to continue", param="continue_final_message")


def _cut(text: str, mark: str) -> str:
    """Return *text* up to the end of the final message, trimmed there if the template trims."""
    at = text.rfind(mark)
    if at < 0:
        message = "the chat template leaves out the final message, so it cannot be continued"
        raise BadRequest(message, param="continue_final_message")
    return text[:at] if text.startswith(f"{mark} ", at) else text[:at].rstrip()
