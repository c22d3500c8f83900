"""A model that thinks first, over HTTP: forms hold behind the thoughts. CASES 76, 80, 81, 82.

Its weights are random, so every legal path is taken sooner or later.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from family_templates import EACH, TEXT, THOUGHTS, chatml
from running_server import MODEL, Server
from tiny import tiny_checkpoint, tiny_tokenizer, write_tokenizer
from tokenizers import AddedToken

TEMPLATE = chatml(
    f"{THOUGHTS}{TEXT}{EACH}<tool_call>{{{{ f | tojson }}}}</tool_call>{{% endfor %}}",
    opening="<think>\n",
).replace("tools | tojson", "tools | length")  # the context is short
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "n": {"type": "integer", "enum": [1, 22, 333]}},
    "required": ["on", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
CLOSED = tiny_tokenizer().get_vocab_size() + TAGS.index("</think>")
CALLS = CLOSED + 1


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinker")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    size = tokenizer.get_vocab_size()
    tiny_checkpoint(folder / "model", "llama", vocab_size=size, tokenizer=False)
    write_tokenizer(folder / "model", tokenizer, chat_template=TEMPLATE)
    flags = ["--served-model-name", MODEL, "--cpu-threads", "1"]
    with Server(folder / "model", folder / "log", flags) as running:
        yield running


def ask(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices, which a stream of the same gives piece by piece."""
    fields = {"temperature": 1, "seed": 5, "max_tokens": 90, "n": 8, **fields}
    fields.setdefault("logit_bias", {str(CLOSED): 7})
    whole = server.chat("Hi", **fields)
    assert whole.status == 200, whole.body
    streamed = [dict.fromkeys(("content", "reasoning", "arguments"), "") for _ in range(8)]
    for event in server.chat("Hi", stream=True, **fields).events:
        for choice in event["choices"]:
            said, delta = streamed[choice["index"]], choice["delta"]
            said["content"] += delta.get("content") or ""
            said["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                said["arguments"] += call["function"].get("arguments", "")
            said["finish"] = choice["finish_reason"]
    choices: list[dict[str, Any]] = whole.json["choices"]
    for choice, said in zip(choices, streamed, strict=True):
        message = choice["message"]
        calls = message.get("tool_calls") or []
        assert (message["content"] or "") == said["content"]
        assert message.get("reasoning_content", "") == said["reasoning"]
        assert "".join(c["function"]["arguments"] for c in calls) == said["arguments"]
        assert choice["finish_reason"] == said["finish"]
    return choices


def test_a_schema_holds_behind_the_thoughts(thinker: Server) -> None:
    """CASE 76: thoughts are free, the answer is valid, and "stop" means that it is whole."""
    choices = ask(thinker, response_format=FORMAT)
    whole = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert len(whole) >= 4
    for choice in choices:
        content = choice["message"]["content"]
        if choice in whole:
            jsonschema.validate(json.loads(content), SCHEMA)
        else:
            assert choice["finish_reason"] == "length" and (content or "{")[0] == "{"
    assert any(len(choice["message"]["reasoning_content"]) > 5 for choice in whole)


@pytest.mark.parametrize("named", [False, True])
def test_forced_calls_follow_thoughts(thinker: Server, named: bool) -> None:
    """CASES 80, 81, 82."""
    choice_of_tool: Any = {"type": "function", "function": {"name": "g"}} if named else "required"
    choices = ask(
        thinker, tools=TOOLS, tool_choice=choice_of_tool, parallel_tool_calls=False, max_tokens=200
    )
    ends = [choice["finish_reason"] for choice in choices]
    assert set(ends) <= {"stop" if named else "tool_calls", "length"} and ends.count("length") <= 4
    for choice in choices:
        if choice["finish_reason"] == "length":
            continue
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("g" if named else "fg")
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert not choice["message"]["content"]


def test_a_call_may_stand_in_place_of_the_form(thinker: Server) -> None:
    """Tools and response_format together: each answer fits the form, or begins a call."""
    fields: dict[str, Any] = {"response_format": FORMAT, "tools": TOOLS}
    kinds = set()
    for bias in (-100, 9):
        for choice in ask(thinker, logit_bias={str(CLOSED): 7, str(CALLS): bias}, **fields):
            content = choice["message"]["content"] or ""
            if content.startswith("<tool_call>") or choice["message"].get("tool_calls"):
                kinds.add("call")
            elif choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(content), SCHEMA)
                kinds.add("form")
    assert kinds == {"call", "form"}


def test_calls_of_strict_functions(thinker: Server) -> None:
    """CASES 80, 81: whatever the model calls of its own accord has good arguments."""
    functions = [{**tool["function"], "strict": True} for tool in TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    bias = {str(CLOSED): 7, str(CALLS): 9}
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": False, "max_tokens": 200}
    choices = ask(thinker, logit_bias=bias, **fields)
    ends = [choice["finish_reason"] for choice in choices]
    assert "tool_calls" in ends
    for choice in choices:
        calls = choice["message"].get("tool_calls") or []
        cut = choice["finish_reason"] == "length"
        for call in calls[:-1] if cut else calls:
            assert call["function"]["name"] in "fg"
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert cut or "<tool_call>" not in (choice["message"]["content"] or "")


def test_without_a_form_nothing_is_held(thinker: Server) -> None:
    choices = ask(thinker, max_tokens=40)
    assert any(choice["message"].get("reasoning_content") for choice in choices)


def test_case_3_output_that_is_no_utf_8(thinker: Server) -> None:
    """512 answers of random bytes: strict JSON and UTF-8, marks for what is none, true bytes."""
    fields: dict[str, Any] = {"temperature": 2, "max_tokens": 16, "ignore_eos": True, "n": 32}
    marked = 0
    for seed in range(16):
        answer = thinker.chat("x", seed=seed, logprobs=True, **fields)
        assert answer.status == 200
        choices = json.loads(answer.body.decode("utf-8", "strict"))["choices"]
        for choice in choices:
            parts = choice["logprobs"]["content"]
            said = b"".join(bytes(each["bytes"] or b"") for each in parts)
            message = choice["message"]
            shown = (message["reasoning_content"] or "") + (message["content"] or "")
            marked += "\ufffd" in shown
            if "<" not in shown and b"<" not in said:
                assert shown.strip() == said.decode("utf-8", "replace").strip()
    assert marked > 100
    whole = thinker.complete("x", seed=1, **fields).json["choices"]
    joined = [""] * 32
    for event in thinker.complete("x", seed=1, stream=True, **fields).events:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    assert joined == [choice["text"] for choice in whole]
    assert any("\ufffd" in text for text in joined)
