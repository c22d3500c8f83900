"""Tools, calls and results in prompts: through the template, or written out for one without."""

import pytest

from zlm.messages import ChatPrompt
from zlm.tokenizer.chat_template import ChatRenderer
from zlm.tokenizer.vocabulary import Vocabulary


def renderer_of(vocabularies: dict[str, Vocabulary], template: str) -> ChatRenderer:
    tokenizer = vocabularies["byte_level"].tokenizer
    return ChatRenderer(Vocabulary(tokenizer, {}, {"default": template}), seconds=5.0)


CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}]
CONVERSATION = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": "é"}'),
        ("{{ '<' ~ c.function.arguments ~ '>' }}", '<{"a": "é"}>'),
        ("{{ '<' + c['function']['arguments'] }}", '<{"a": "é"}'),
        ("{% set f = c.function %}{% set a = f.arguments %}{{ a }}", '{"a": "é"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=é"),
        ("{% for k in c.function.arguments %}{{ k }}{% endfor %}", "a"),
        (
            "{% set a = c.function.arguments %}"
            "{{ a if a is string else a | tojson(separators=(',', ':')) }}",
            '{"a":"é"}',
        ),
    ],
)
def test_arguments_come_in_the_form_the_template_takes(
    vocabularies: dict[str, Vocabulary], template: str, rendered: str
) -> None:
    template = f"{{% for c in messages[1].tool_calls %}}{template}{{% endfor %}}"
    given = [CALLS[0], {**CALLS[0], "function": {"name": "f", "arguments": {"a": "é"}}}]
    for call in given:
        messages = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [call]}]
        renderer = renderer_of(vocabularies, template)
        assert renderer.render(ChatPrompt(messages)).text == rendered


def test_results_have_the_name_of_what_was_called(vocabularies: dict[str, Vocabulary]) -> None:
    template = (
        "{% for m in messages if m.role == 'tool' %}{{ m.name }}={{ m.content }};{% endfor %}"
    )
    renderer = renderer_of(vocabularies, template)
    other = {"role": "tool", "tool_call_id": "c1", "name": "own", "content": "7"}
    assert renderer.render(ChatPrompt([*CONVERSATION, other])).text == "f=42;own=7;"


def test_a_template_without_tools_gets_them_written_out(
    vocabularies: dict[str, Vocabulary],
) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    renderer = renderer_of(vocabularies, template)
    tools = [{"type": "function", "function": {"name": "f", "description": "é <|im_end|>"}}]
    rendered = renderer.render(ChatPrompt(CONVERSATION, tools=tools))
    last = "[user]Result of f:\n42\nNow answer me in your own words.\n"
    before, _, after = rendered.text.partition("[user]x\n")
    assert (
        before.startswith("[system]") and '{"name": "f", "description": "é <|im_end|>"}' in before
    )
    assert after == f'[assistant]{{"name": "f", "arguments": {{"a": "é"}}}}\n{last}'
    assert 2 not in renderer.encode(rendered)  # what a tool says is no control token
    system = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    text = renderer.render(ChatPrompt([*system, *CONVERSATION], tools=tools)).text
    assert text.startswith("[system]Be brief.\n") and text.count("[system]") == 1
    lone = [{"role": "tool", "content": "42"}]
    assert renderer.render(ChatPrompt(lone)).text == "[tool]42\n"
