"""Tools in the conversation of a model whose chat template knows nothing of tools.

Such a template would leave out the functions, the calls and perhaps the results, so they are
written into the messages: the functions into the system message, calls into the assistant's
content as the JSON that is read back from it, results into messages of the user. Pure.
"""

import json
from typing import Any

_WORD = "tool"  # a template without it, in any name or text, knows nothing of them

_INSTRUCTIONS = """You may call these functions:
{functions}
To call one, answer with a JSON object alone: {{"name": ..., "arguments": {{...}}}}.
When you have its result, answer the user in your own words."""
# Without a last word small models call again for ever.
_AFTER_RESULTS = "Now answer me in your own words."


def knows_tools(template: str) -> bool:
    """Tell whether *template* does something with tools."""
    return _WORD in template


def write_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return *messages* with all that tools add to them as text; contents as they were given."""
    names: dict[str, str] = {}
    written = [_message(message, names) for message in messages]
    for i, message in enumerate(messages):
        next_role = messages[i + 1].get("role") if i + 1 < len(messages) else None
        if message.get("role") == "tool" and next_role != "tool":
            written[i] = _with_text(written[i], _AFTER_RESULTS)
    if not tools:
        return written
    functions = "\n".join(
        json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools
    )
    instructions = _INSTRUCTIONS.format(functions=functions)
    if written and written[0].get("role") in ("system", "developer"):
        return [_with_text(written[0], instructions), *written[1:]]
    return [{"role": "system", "content": instructions}, *written]


def _message(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return *message* as text; *names* maps ids of the calls so far to their functions."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        bare = {key: value for key, value in message.items() if key != "tool_calls"}
        return _with_text(bare, "\n".join(_call(call, names) for call in calls))
    if message.get("role") != "tool":
        return message
    name = message.get("name") or names.get(str(message.get("tool_call_id")))
    result = {"role": "user", "content": f"Result of {name}:" if name else "Result:"}
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        result = _with_text(result, text if isinstance(text, str) else "")
    return result


def _call(call: Any, names: dict[str, str]) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return json.dumps(call, ensure_ascii=False)
    name, arguments = function.get("name"), function.get("arguments")
    names[str(call.get("id"))] = str(name)
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    said = json.dumps(name, ensure_ascii=False)
    return f'{{"name": {said}, "arguments": {arguments or "{}"}}}'


def _with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return *message* with *text* behind its content."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n{text}" if content else text}
