"""Tool calls and reasoning from Generate to Deltas, with a fake engine that says scripted tokens.

CASES 80, 81, 82, 84.
"""

import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from scripted_model import Model

from zlm.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from zlm.messages import FINISH_EOS, FINISH_LENGTH, RUNNING, ToolCallDelta
from zlm.tokenizer.output_formats import (
    REASONING_PARSER_NAMES,
    TOOL_PARSER_NAMES,
    reasoning_format,
    tool_format,
)
from zlm.tokenizer.output_parts import joined_calls

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN = TURNS + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}{# <tool_call> </think> #}{{ tools | tojson if tools }}"
)
OPENED = TURNS + "<think>\n{% endif %}{# <tool_call> </think> #}"
MISTRAL = TURNS + "{% endif %}{# [TOOL_CALLS] #}"
PLAIN = TURNS + "{% endif %}"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀", "b": [1, 2]}}\n</tool_call>'
ARGUMENTS = '{"a": "é😀", "b": [1, 2]}'


@pytest.fixture
def make_model(make_engine: Callable, save_folder: Callable) -> Callable[..., Model]:
    return partial(Model.of, make_engine, save_folder)


def test_a_call(make_model: Callable) -> None:
    """CASES 81, 82: a call of the model's own choice ends as tool_calls, in both modes."""
    model = make_model(QWEN)
    assert model.answer(f"Sure.\n\n{CALL}\n") == ("", "Sure.", [("f", ARGUMENTS)], "tool_calls")
    assert model.answer("No call.") == ("", "No call.", [], "stop")
    assert model.engine.core.open_requests == 0


def test_a_call_cut_by_the_limit_is_length(make_model: Callable) -> None:
    """CASE 80: length in both modes, wherever the limit falls; never tool_calls, nor markup."""
    model = make_model(QWEN)
    for length in range(1, len(CALL)):
        reasoning, content, calls, reason = model.answer(CALL[:length], finish=FINISH_LENGTH)
        assert reason == "length" and not reasoning
        assert not calls or ARGUMENTS.startswith(calls[0][1])
        assert content == (CALL[:length] if length < len("<tool_call>") else "")


def test_a_call_that_is_none_is_content_and_stops(make_model: Callable) -> None:
    model = make_model(QWEN)
    assert model.answer("<tool_call>oops</tool_call>") == (
        "", "<tool_call>oops</tool_call>", [], "stop",
    )  # fmt: skip


def test_without_tools_a_call_is_text(make_model: Callable) -> None:
    """CASE 84: tool_choice none: no calls, text untouched."""
    model = make_model(QWEN)
    assert model.answer(f" {CALL}\n", choice=None) == ("", f" {CALL}\n", [], "stop")


def test_one_call_at_most(make_model: Callable) -> None:
    """parallel_tool_calls false: the answer ends with its first call, and so does the work."""
    model = make_model(QWEN)
    text = f"{CALL}\n{CALL} and"
    assert model.answer(text, parallel=False) == ("", "", [("f", ARGUMENTS)], "tool_calls")
    assert len(model.engine.aborts) == 2
    assert len(model.answer(text)[2]) == 2


def test_forced_calls(make_model: Callable) -> None:
    """CASES 80, 81: required ends as tool_calls, a named function as stop, both cut as length."""
    listed = f'[{{"name": "f", "arguments": {ARGUMENTS}}}]'
    said = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}'
    for template, required, named in ((PLAIN, listed, ARGUMENTS), (QWEN, said, said)):
        model = make_model(template)
        for choice, text, ends in (("required", required, "tool_calls"), ("named", named, "stop")):
            assert model.answer(text, choice=choice) == ("", "", [("f", ARGUMENTS)], ends)
            for length in (len(text) - 6, len(text) - 8, 15):
                cut = {"choice": choice, "finish": FINISH_LENGTH}
                _, content, calls, reason = model.answer(text[:length], **cut)
                assert (content, reason) == ("", "length")
                assert not calls or ARGUMENTS.startswith(calls[0][1])


def test_special_tokens_that_mark_calls_are_seen(make_model: Callable) -> None:
    model = make_model(MISTRAL, specials=("[TOOL_CALLS]", "[ARGS]"))
    text = f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]'
    for said in (text, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"):
        assert model.answer(said) == ("", "", [("f", ARGUMENTS)], "tool_calls")
    (delta,) = model.say(text)
    (call,) = delta.tool_calls
    assert call.id is not None and len(call.id) == 9 and call.id.isalnum()
    # Others stay hidden, and so do these when nobody looks for calls.
    assert model.answer("a<|im_start|>b")[1] == "ab"
    assert model.answer("a[TOOL_CALLS]b", choice=None)[1] == "ab"


def test_ids_are_unique(make_model: Callable) -> None:
    model = make_model(QWEN)
    (delta,) = model.say(f"{CALL}{CALL}")
    ids = [call.id for call in delta.tool_calls]
    assert len(set(ids)) == 2 and all(i and i.startswith("call_") for i in ids)


def test_reasoning(make_model: Callable) -> None:
    model = make_model(QWEN)
    text = f"<think>\nHm é😀.\n</think>\n\nYes.{CALL}"
    assert model.answer(text) == ("Hm é😀.", "Yes.", [("f", ARGUMENTS)], "tool_calls")
    assert model.answer("<think>\nHm", choice=None, finish=FINISH_LENGTH)[:2] == ("Hm", "")
    assert model.answer("</think>Hm", choice=None, kwargs={"enable_thinking": False}) == (
        "", "</think>Hm", [], "stop",
    )  # fmt: skip
    assert model.answer(text, drop_reasoning=True)[:2] == ("", "Yes.")


def test_reasoning_that_the_prompt_opens(make_model: Callable) -> None:
    model = make_model(OPENED)
    assert model.answer("Hm.\n</think>\n\nYes.", choice=None)[:2] == ("Hm.", "Yes.")


def test_after_the_thoughts_deltas_are_plain_again(make_model: Callable) -> None:
    model = make_model(QWEN)
    seq_id = model.ask(choice=None, stream=True)
    for token in model.engine.core.vocabulary.encode("<think>a</think>b"):
        model.engine.step((seq_id, token, RUNNING))
    assert model.engine.core._choices[seq_id].is_plain


def test_flags_override_the_template(make_model: Callable) -> None:
    model = make_model(PLAIN, tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    assert model.answer(f"Hm.</think>{CALL}") == ("Hm.", "", [("f", ARGUMENTS)], "tool_calls")
    for model.continues, said in (
        ("<think>I", ("Hm.", "Yes.")),
        ("<think>I know.</think>", ("", "Hm.</think>Yes.")),
        ("<think>I know.</think>The answer", ("", "Hm.</think>Yes.")),
    ):
        assert model.answer("Hm.</think>Yes.", choice=None)[:2] == said
    model = make_model(QWEN, reasoning_parser="deepseek_r1")
    closed = {"enable_thinking": False}
    assert model.answer("Yes.", choice=None, kwargs=closed)[:2] == ("", "Yes.")


def test_reasoning_can_be_left_in(make_model: Callable) -> None:
    model = make_model(OPENED, reasoning_parser="none")
    assert model.answer("Hm.</think>Yes.", choice=None)[:2] == ("", "Hm.</think>Yes.")


def test_stop_strings_and_logprobs_go_with_calls(make_model: Callable) -> None:
    model = make_model(QWEN)
    assert model.answer(f"{CALL}\nstop here", stop=["stop"])[1:] == (
        "", [("f", ARGUMENTS)], "tool_calls",
    )  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pieces=st.lists(
        st.sampled_from([CALL, CALL[:40], "<think>", "</think>", "\n", "é😀", "<tool_call>", "}"]),
        max_size=5,
    ),
    choice=st.sampled_from([None, "auto", "required", "named"]),
    finish=st.sampled_from([FINISH_EOS, FINISH_LENGTH]),
)
def test_streams_join_to_the_whole_answer(
    make_model: Callable, pieces: list[str], choice: str | None, finish: int
) -> None:
    """CASE 82."""
    model = make_model(QWEN)
    _, _, calls, reason = model.answer("x" + "".join(pieces), choice=choice, finish=finish)
    if finish == FINISH_LENGTH and not (choice == "named" and calls):
        assert reason == "length"
    if reason == "tool_calls":
        assert calls and all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("<tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("{{ '<|python_tag|>' + call }}", "llama3_json"),
        ("put it in the format of [func_name1(params_name1=params_value1)]", "pythonic"),
        ("<start_function_call>call:{{ name }}", "functiongemma"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("{{ tools | tojson }}", "json"),
    ],
)
def test_formats_are_found_in_the_template(sign: str, name: str) -> None:
    assert tool_format(TURNS + "{% endif %}" + sign) == name


def test_reasoning_is_found_in_the_template() -> None:
    assert reasoning_format(QWEN) == "think"
    assert reasoning_format("[THINK]") == "mistral"
    assert reasoning_format("<|channel>thought\n<channel|>") == "gemma4"
    assert reasoning_format(PLAIN) is None


def test_every_format_that_a_flag_may_name_is_there() -> None:
    assert set(TOOL_CALL_PARSERS) <= set(TOOL_PARSER_NAMES)
    assert set(REASONING_PARSERS) - {"none"} <= set(REASONING_PARSER_NAMES)


def test_pieces_of_calls_join() -> None:
    pieces = [
        ToolCallDelta(0, id="a", name="f"), ToolCallDelta(0, '{"x"'), ToolCallDelta(0, ": 1}"),
        ToolCallDelta(1, "{}", id="b", name="g"),
    ]  # fmt: skip
    assert joined_calls(pieces) == [
        ToolCallDelta(0, '{"x": 1}', "a", "f"), ToolCallDelta(1, "{}", "b", "g"),
    ]  # fmt: skip
