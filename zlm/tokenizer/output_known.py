"""The formats that models write tool calls and thoughts in, by name.

A table: what reads a format, and the texts that tell it apart. Which of them a model has is for
``output_formats`` to find out.
"""

from typing import NamedTuple

from zlm.tokenizer.output_harmony import MARKERS as HARMONY_MARKERS, harmony
from zlm.tokenizer.output_source import Reader
from zlm.tokenizer.tools_json import (
    bare_json,
    forced_arguments,
    forced_list,
    llama3,
    marked,
    mistral,
)
from zlm.tokenizer.tools_sections import DEEPSEEK, KIMI_K2, deepseek_head, kimi_head, sections
from zlm.tokenizer.tools_tagged import (
    DEEPSEEK_V32,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    TagMarks,
    glm,
    tagged,
)
from zlm.tokenizer.tools_written import FUNCTION_GEMMA, GEMMA4, gemma, pythonic


class ToolFormat(NamedTuple):
    """A format of tool calls.

    markers: texts it needs, though they may be special tokens.
    openings: what a call surely begins with; empty: only its whole text tells.
    ends_thoughts: texts that stand in no thoughts, whether those are closed or not.
    """

    read: Reader
    markers: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    ends_thoughts: tuple[str, ...] = ()
    marks: tuple[str, str] | None = None  # around calls that are JSON: name and arguments
    heads: tuple[str, str] | None = None  # behind a call's name: before its id, before arguments
    nine_letter_ids: bool = False  # the template takes no other ids of calls
    channels: bool = False  # calls and thoughts are told by the same texts: harmony


class ReasoningFormat(NamedTuple):
    """Thoughts between two texts. ``assumed``: the text begins within, opened or not."""

    opening: str
    closing: str
    assumed: bool = False
    markers: tuple[str, ...] = ()  # further texts that it needs
    channels: bool = False  # as in ToolFormat


def _marked(opening: str, closing: str = "", *, usual: bool = True) -> ToolFormat:
    """*usual*: the keys of a call are ``name`` and ``arguments``."""
    texts = (opening, closing) if closing else (opening,)
    marks = (opening, closing) if usual else None
    return ToolFormat(marked(opening, closing), texts, (opening,), marks=marks)


def _tagged(marks: TagMarks) -> ToolFormat:
    return ToolFormat(tagged(marks), (marks.opening, marks.closing), (marks.opening, marks.call))


TOOL_FORMATS = {
    "hermes": _marked("<tool_call>", "</tool_call>"),
    "mistral": ToolFormat(
        mistral,
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]", ""),
        heads=("[CALL_ID]", "[ARGS]"),
        nine_letter_ids=True,
    ),
    "llama3_json": ToolFormat(llama3, ("<|python_tag|>",)),
    "pythonic": ToolFormat(
        pythonic("<|python_start|>", "<|python_end|>"), ("<|python_start|>", "<|python_end|>")
    ),
    "functiongemma": ToolFormat(
        gemma(FUNCTION_GEMMA), tuple(FUNCTION_GEMMA), (FUNCTION_GEMMA.opening,)
    ),
    "gemma4": ToolFormat(gemma(GEMMA4), tuple(GEMMA4), (GEMMA4.opening,)),
    "json": ToolFormat(bare_json),
    "qwen3_coder": _tagged(QWEN3_CODER),
    "seed_oss": _tagged(SEED_OSS),
    "minimax_m2": _tagged(MINIMAX_M2),
    "deepseek_v32": _tagged(DEEPSEEK_V32),
    "glm45": ToolFormat(
        glm,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<tool_call>",),
    ),
    "deepseek_v3": ToolFormat(
        sections(DEEPSEEK, deepseek_head),
        tuple(DEEPSEEK),
        (DEEPSEEK.section, DEEPSEEK.call),
        (DEEPSEEK.section,),
    ),
    "kimi_k2": ToolFormat(
        sections(KIMI_K2, kimi_head),
        tuple(KIMI_K2),
        (KIMI_K2.section, KIMI_K2.call),
        (KIMI_K2.section,),
    ),
    "harmony": ToolFormat(harmony(reasons=False, calls=True), HARMONY_MARKERS, channels=True),
    "granite": _marked("<|tool_call|>"),
    "phi4_mini": _marked("<|tool_call|>", "<|/tool_call|>"),
    "functools": _marked("functools"),
    "cohere": _marked("<|START_ACTION|>", "<|END_ACTION|>", usual=False),
    "nemotron": _marked("<TOOLCALL>", "</TOOLCALL>"),
    "tool_calls": _marked("<tool_calls>", "</tool_calls>"),
    "internlm": _marked("<|action_start|><|plugin|>", "<|action_end|>", usual=False),
    "lfm2": ToolFormat(
        pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|tool_call_start|>",),
    ),
    "olmo3": ToolFormat(
        pythonic("<function_calls>", "</function_calls>", listed=False),
        ("<function_calls>", "</function_calls>"),
        ("<function_calls>",),
    ),
}
REQUIRED = ToolFormat(forced_list)  # what the grammar of tool_choice required allows
NAMED = ToolFormat(forced_arguments)  # the same of a tool_choice that names a function

REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", assumed=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "apriel": ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "harmony": ReasoningFormat("", "", markers=HARMONY_MARKERS, channels=True),
}
