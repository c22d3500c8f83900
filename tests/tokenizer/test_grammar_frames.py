"""Grammars behind thoughts, beside tool calls and in harmony: what may be said, and what comes out.

CASES 75, 76, 81.
"""

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from family_templates import FAMILIES
from scripted_model import Model

from zlm.engine.grammar import GrammarCompiler, GrammarMatcher, GrammarState
from zlm.messages import FINISH_EOS, FINISH_GRAMMAR, FINISH_LENGTH, RUNNING, Grammar, TokenBytes
from zlm.sampling_params import StructuredOutputsParams

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMS: list[tuple[StructuredOutputsParams, str, str]] = [
    (StructuredOutputsParams(json=SCHEMA), '{"a": 5}', '{"b": 5}'),
    (StructuredOutputsParams(json_object=True), '{"x": []}', "[]"),
    (StructuredOutputsParams(regex="[0-9]{3}"), "123", "12a"),
    (StructuredOutputsParams(choice=["red", "grün"]), "grün", "green"),
    (StructuredOutputsParams(grammar='start: "x" y\ny: "y" | "z" y'), "xzzy", "xx"),
    (StructuredOutputsParams(grammar='root ::= "p" ("q" | "r")'), "pr", "ps"),
]
TURNS = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{# </think> <tool_call> #}"
OPTIONAL = TURNS + "{{ '<think></think>\n' if enable_thinking is false }}"
OPENED = TURNS + "<think>\n"
MISTRAL = FAMILIES["magistral"].template
GPT_OSS, HARMONY = FAMILIES["gpt_oss"].template, FAMILIES["gpt_oss"].specials
HEAD = "<|start|>assistant<|channel|>"


class Asked:
    """A request with a grammar: the matcher that its answer follows, and the answer itself."""

    def __init__(self, model: Model, **fields: Any) -> None:
        self.model = model
        self.seq_id = model.ask(**fields)
        engine = model.engine
        (submit,) = [s for s in engine.submits if s.seq_id == self.seq_id]
        assert submit.grammar is not None
        self.grammar: Grammar = submit.grammar

    def matcher(self) -> GrammarMatcher:
        return compiler(self.model.engine.vocabularies[0]).compile(self.grammar)

    def follows(self, text: str) -> str:
        """Return how far *text* may be said: where it is not allowed, or the state at its end."""
        matcher = self.matcher()
        said: list[int] = []
        for token in self.model.engine.core.vocabulary.encode(text):
            if matcher.state is not GrammarState.OPEN or token not in allowed(matcher):
                return "not behind " + self.model.engine.core.vocabulary.decode(
                    said, skip_special_tokens=False
                )
            matcher.advance(token)
            said.append(token)
        if matcher.state is GrammarState.COMPLETE:
            return "complete"
        return "may end" if EOS in allowed(matcher) else "open"


@cache
def compiler(tokens: TokenBytes) -> GrammarCompiler:
    return GrammarCompiler(tokens, 512)


def allowed(matcher: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(matcher.words.view(np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits).tolist()
    return ids


@pytest.fixture
def make_model(make_engine: Callable, save_folder: Callable) -> Callable[..., Model]:
    def make(template: str, **fields: Any) -> Model:
        return Model.of(make_engine, save_folder, template, **fields)

    return make


def test_an_answer_stands_behind_thoughts(make_model: Callable) -> None:
    """CASE 76: with thoughts or without, and nothing else: no end before the answer is whole."""
    model = make_model(OPTIONAL)
    for form, good, bad in FORMS:
        asked = Asked(model, choice=None, structured_outputs=form)
        for before in ("", "<think></think>", "\n<think>\nHm {é}.\n</think>\n\n"):
            assert asked.follows(before + good) in ("complete", "may end"), form
            assert asked.follows(before + bad).startswith("not behind"), form
        assert asked.follows("<think>\nHm {é}.\n</think") == "open", form
        assert asked.follows("Hm").startswith("not behind"), form
    # Thoughts that the prompt has closed are none.
    off = Asked(model, choice=None, structured_outputs=form, kwargs={"enable_thinking": False})
    assert off.grammar.frame == ""


def test_an_answer_stands_behind_thoughts_that_the_prompt_opens(make_model: Callable) -> None:
    """CASE 76."""
    model = make_model(OPENED)
    for form, good, bad in FORMS:
        asked = Asked(model, choice=None, structured_outputs=form)
        assert asked.follows(f"Hm.\n</think>\n{good}") in ("complete", "may end"), form
        assert asked.follows(f"Hm.</think>\n{bad}").startswith("not behind"), form
        assert asked.follows(good) == "open", form  # still a thought
    unsplit = make_model(OPENED, reasoning_parser="none")
    assert Asked(unsplit, choice=None, structured_outputs=form).grammar.frame == ""


def test_tags_that_are_special_tokens(make_model: Callable) -> None:
    model = make_model(MISTRAL, specials=FAMILIES["magistral"].specials)
    asked = Asked(model, choice=None, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    assert asked.follows('[THINK]Hm.[/THINK]{"a": 5}') == "complete"
    assert asked.follows('\n[THINK]Hm.[/THINK]\n{"a": 5}') == "complete"
    assert asked.follows('[THINK]Hm.[/THINK]{"b": 5}') == 'not behind [THINK]Hm.[/THINK]{"'
    assert asked.follows('{"a": 5}') == "complete"


@pytest.mark.parametrize("template", [OPTIONAL, OPENED])
def test_a_call_may_stand_in_place_of_the_answer(make_model: Callable, template: str) -> None:
    """response_format and tools together: the answer fits, or it is a call."""
    model = make_model(template)
    form = StructuredOutputsParams(json=SCHEMA)
    asked = Asked(model, structured_outputs=form)
    thoughts = "Hm.</think>" if template is OPENED else "<think>Hm.</think>\n"
    call = '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>'
    assert asked.follows(f"{thoughts}{call}") == "may end"
    assert asked.follows(f'{thoughts}{{"a": 5}}') == "complete"
    assert asked.follows(f"{thoughts}No").startswith("not behind")
    assert model.answer(f"{thoughts}{call}", structured_outputs=form) == (
        "Hm.", "", [("f", '{"b": 1}')], "tool_calls",
    )  # fmt: skip
    assert model.answer(f'{thoughts}{{"a": 5}}', structured_outputs=form) == (
        "Hm.", '{"a": 5}', [], "stop",
    )  # fmt: skip


STRICT: list[tuple[str, tuple[str, ...], str, str]] = [
    (TURNS.replace("</think>", ""), (), "<tool_call>", "</tool_call>"),
    (OPTIONAL, (), "<think>Hm <tool_call>x</think><tool_call>", "</tool_call>"),
    (OPENED, (), "Hm <tool_call>x</think>\n<tool_call>", "</tool_call>"),
    (FAMILIES["granite"].template, ("<|tool_call|>",), "<|tool_call|>", ""),
    (MISTRAL, FAMILIES["magistral"].specials, "[THINK]Hm.[/THINK][TOOL_CALLS]", ""),
]


@pytest.mark.parametrize(("template", "specials", "opening", "closing"), STRICT)
def test_calls_of_strict_functions_fit_their_parameters(
    make_model: Callable, template: str, specials: tuple[str, ...], opening: str, closing: str
) -> None:
    """CASE 81: text is free, but what is a call is one of a listed function with good arguments."""
    model = make_model(template, specials=specials)
    calls = forced("required")
    asked = Asked(model, grammar=calls)
    good = f'{opening}\n{{"name": "f", "arguments": {{"a": 5}}}}\n{closing}'
    for text in ("{", "[1", "é😀<tool", good, f"{good}\nSo.", good.replace("\n", "")):
        behind = "Hm.</think>" if template is OPENED and "Hm" not in text else ""
        assert asked.follows(behind + text) == "may end", text
    assert asked.follows(f"{opening}oops").startswith("not behind")
    assert asked.follows(good.replace("5", '"5"')).startswith("not behind")
    assert asked.follows(good.replace('"f"', '"g"')).startswith("not behind")
    if closing:
        assert asked.follows(good.removesuffix(closing)) == "open"  # no end within a call
    _, content, said, reason = model.answer(good, grammar=calls)
    assert (content, said, reason) == ("", [("f", '{"a": 5}')], "tool_calls")
    # A form that the whole answer is to have wins; what is not parsed is not held.
    form = StructuredOutputsParams(choice=["red"])
    both = Asked(model, grammar=calls, structured_outputs=form)
    assert both.grammar.kind == "choice" and "call" in both.grammar.frame
    model.ask(grammar=calls, detokenize=False)
    assert model.engine.submits[-1].grammar is None


def test_calls_of_strict_functions_by_name(make_model: Callable) -> None:
    """Mistral's newer form: the name, perhaps an id, the arguments."""
    model = make_model(MISTRAL, specials=FAMILIES["magistral"].specials)
    calls = forced("required")
    free, required = Asked(model, grammar=calls), Asked(model, choice="required", grammar=calls)
    for asked in (free, required):
        for head in ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS] "):
            assert asked.follows(f'{head}{{"a": 5}}') in ("may end", "complete")
            assert asked.follows(f'{head}{{"a": "5"}}').startswith("not behind")
        assert asked.follows('[TOOL_CALLS]g[ARGS]{"a": 5}').startswith("not behind")
    assert free.follows('Yes. [TOOL_CALLS]f[ARGS]{"a": 5}[TOOL_CALLS]f[ARGS]{"a": 6}') == "may end"
    assert required.follows("Yes").startswith("not behind")
    _, _, said, reason = model.answer('[TOOL_CALLS]f[ARGS]{"a": 5}', grammar=calls)
    assert (said, reason) == ([("f", '{"a": 5}')], "tool_calls")


def test_calls_of_strict_functions_in_harmony(make_model: Callable) -> None:
    model = make_model(GPT_OSS, specials=HARMONY)
    asked = Asked(model, grammar=forced("required"))
    said = f"<|channel|>commentary<|message|>I ask.<|end|>{HEAD}commentary to=functions.f"
    assert asked.follows(f'{said}<|message|>{{"a": 5}}') == "complete"
    assert asked.follows(f'{said} <|constrain|>json<|message|>{{"b"').startswith("not behind")
    assert asked.follows("<|channel|>final<|message|>Hello") == "may end"


def test_a_format_that_is_not_held_is_free(make_model: Callable) -> None:
    model = make_model(FAMILIES["qwen3_coder"].template)
    model.ask(grammar=forced("required"))
    assert model.engine.submits[-1].grammar is None


def forced(choice: str) -> Grammar:
    """Return what the front end makes of *choice*: the arguments, or a list of calls."""
    if choice == "named":
        return Grammar("json_schema", json.dumps(SCHEMA))
    call = {
        "type": "object",
        "properties": {"name": {"const": "f"}, "arguments": {"$ref": "#/$defs/tool0"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    whole = {"type": "array", "items": {"anyOf": [call]}, "minItems": 1, "maxItems": 1}
    return Grammar("json_schema", json.dumps({**whole, "$defs": {"tool0": SCHEMA}}))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_forced_calls_follow_thoughts(make_model: Callable, choice: str, native: bool) -> None:
    """CASE 81: between the model's own marks, if its calls are JSON there."""
    fields: dict[str, Any] = {"choice": choice, "grammar": forced(choice)}
    said = '{"a": 5}' if choice == "named" else '[{"name": "f", "arguments": {"a": 5}}]'
    if native:
        said = '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'
    model = make_model(OPENED if native else OPENED.replace("<tool_call>", "tool"))
    asked = Asked(model, **fields)
    assert asked.follows(f"Hm.</think>{said}") == "complete"
    assert asked.follows(f"Hm.</think>{said.replace('5', 'x')}").startswith("not behind")
    assert asked.follows("Hm.</think>Hello").startswith("not behind")
    reasoning, content, calls, reason = model.answer(
        f"Hm.</think>\n\n{said}", finish=FINISH_GRAMMAR, **fields
    )
    assert (reasoning, content, calls) == ("Hm.", "", [("f", '{"a": 5}')])
    assert reason == ("stop" if choice == "named" else "tool_calls")


def test_harmony(make_model: Callable) -> None:
    """An answer stands in the final message, a forced call in commentary to its function."""
    model = make_model(GPT_OSS, specials=HARMONY)
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    form = StructuredOutputsParams(json=SCHEMA)
    asked = Asked(model, choice=None, structured_outputs=form)
    assert asked.follows('<|channel|>final<|message|>{"a": 5}') == "complete"
    assert (
        asked.follows(f'{thought}{HEAD}final <|constrain|>json<|message|>{{"a": 5}}') == "complete"
    )
    assert asked.follows(f"{thought}{HEAD}final<|message|>5").startswith("not behind")
    assert asked.follows(f"{thought}{HEAD}commentary to=functions.f").startswith("not behind")
    assert asked.follows(thought) == "open"
    call = f'{thought}{HEAD}commentary to=functions.f <|constrain|>json<|message|>{{"a": 5}}'
    assert Asked(model, structured_outputs=form).follows(call) == "may end"
    for choice in ("required", "named"):
        fields: dict[str, Any] = {"choice": choice, "grammar": forced(choice)}
        asked = Asked(model, **fields)
        assert asked.follows(call) == "complete"
        assert asked.follows(f"{thought}{HEAD}final").startswith("not behind")
        assert asked.follows(call.replace("5", "x")).startswith("not behind")
        assert asked.follows(call.replace("functions.f", "functions.g")).startswith("not behind")
        reason = "stop" if choice == "named" else "tool_calls"
        assert model.answer(call, finish=FINISH_GRAMMAR, **fields) == (
            "Hm.", "", [("f", '{"a": 5}')], reason,
        )  # fmt: skip


def test_a_bad_grammar_is_still_a_400(make_model: Callable) -> None:
    """CASE 75: in the compiler's words, whatever stands around it."""
    model = make_model(OPENED)
    with pytest.raises(ValueError, match="not enough values"):  # nothing is submitted
        model.ask(choice=None, structured_outputs=StructuredOutputsParams(regex="(a"))
    failed = model.engine.failed()
    assert failed.status == 400 and "unclosed group" in failed.message


def test_a_continued_message_is_past_its_thoughts(make_model: Callable) -> None:
    model = make_model(OPTIONAL)
    form = StructuredOutputsParams(json=SCHEMA)
    for content, framed in (('{"a":', False), ("<think>Hm", True)):
        model.continues = content
        assert bool(Asked(model, choice=None, structured_outputs=form).grammar.frame) is framed


@pytest.mark.parametrize("name", ["optional", "opened", "gpt_oss", "magistral"])
@pytest.mark.parametrize("choice", [None, "required"])
def test_whatever_is_drawn_fits(make_model: Callable, name: str, choice: str | None) -> None:
    """CASES 76, 81: tokens drawn at random from what is allowed, through the whole core."""
    templates = {"optional": (OPTIONAL, ()), "opened": (OPENED, ())}
    family = FAMILIES.get(name)
    template, specials = templates.get(name) or (family.template, family.specials)  # type: ignore[union-attr]
    model = make_model(template, specials=specials)
    form = {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}
    fields: dict[str, Any] = {"grammar": forced("required")} if choice else form
    asked = Asked(model, choice=choice, **fields)
    random_ = random.Random(name)
    encode = model.engine.core.vocabulary.encode
    finished = 0
    for _ in range(12):
        seq_id = model.ask(choice=choice, **fields)
        matcher = asked.matcher()
        deltas = []
        closing = encode({"magistral": "[/THINK]", "gpt_oss": "<|end|>"}.get(name, "</think>"))
        for step in range(200):
            ids = allowed(matcher)
            token = random_.choice(ids)
            if step > 9 and closing and len(ids) > 200:  # these thoughts would never end
                token = closing.pop(0)
            matcher.advance(token)
            assert matcher.state is not GrammarState.FAILED
            code = FINISH_EOS if token == EOS else RUNNING
            if matcher.state is GrammarState.COMPLETE and code == RUNNING:
                code = FINISH_GRAMMAR
            code = FINISH_LENGTH if step == 199 and code == RUNNING else code
            for answer in model.engine.step((seq_id, token, code)):
                deltas += answer.items
            if code != RUNNING:
                break
        (delta,) = deltas
        if delta.finish_reason == "length":
            continue
        finished += 1
        if choice is None:
            assert delta.finish_reason == "stop" and not delta.tool_calls
            jsonschema.validate(json.loads(delta.text), SCHEMA)
        else:
            assert delta.finish_reason == "tool_calls" and not delta.text.strip()
            (call,) = delta.tool_calls
            assert call.name == "f"
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert finished >= 6
