"""From the grammar that a request asks for to the one that its whole output follows.

What a client asks for is the form of an answer, the arguments of a function, or a list of calls; a
model writes thoughts before it and, if its format has any, marks around it.
"""

from typing import Literal

import msgspec

from zlm.messages import Generate, Grammar
from zlm.tokenizer.grammar_frames import GrammarFrames
from zlm.tokenizer.output_known import NAMED, REQUIRED, ReasoningFormat, ToolFormat

# Where a prompt ends: before the thoughts, if there will be any, within them, or behind them.
Place = Literal["before", "within", "behind"]


def tools_of(message: Generate, native: ToolFormat, place: Place) -> ToolFormat | None:
    """Return how the calls in *message*'s answer are written; None if there can be none.

    Forced calls are plain JSON, unless the grammar can have them as the model is used to. Beside a
    form that the answer is to have, a call must show where it begins.
    """
    if message.tools is None:
        return None
    if message.tools.choice == "auto":
        has_form = message.params.structured_outputs is not None
        return native if native.channels or native.openings or not has_form else None
    if native.marks is not None or (native.channels and place == "before"):
        return native
    return REQUIRED if message.tools.choice == "required" else NAMED


def whole_grammar(
    frames: GrammarFrames,
    message: Generate,
    grammar: Grammar,
    reasoning: ReasoningFormat | None,
    tools: ToolFormat | None,
    place: Place,
) -> Grammar | None:
    """Return *grammar* with all that may stand around it; None if it cannot be held to.

    *grammar* was asked for by *message*: of an answer's form, else what its tools need.
    """
    if place == "behind":
        reasoning = None
    opened = place == "within"
    choice = "none" if message.tools is None or tools is None else message.tools.choice
    function = message.tools.names[0] if message.tools is not None and choice == "named" else None
    forced, strict = choice == "required", choice == "auto" and grammar is message.grammar
    if place != "behind" and any(f is not None and f.channels for f in (reasoning, tools)):
        if forced or strict:
            return frames.harmony_calls(grammar, forced=forced)
        frame = frames.harmony(function=function, calls=choice == "auto")
        return msgspec.structs.replace(grammar, frame=frame)
    marks = None if tools is None else tools.marks
    if tools is not None and marks is not None and (forced or strict):
        return frames.calls_in_text(
            grammar, marks, reasoning, opened=opened, forced=forced, heads=tools.heads
        )
    if strict:
        return None
    if marks is not None and function is not None:
        frame = frames.call_of(function, marks, reasoning, opened=opened)
    else:
        calls = tools.openings if tools is not None and choice == "auto" else ()
        frame = frames.around(reasoning, opened=opened, calls=calls)
    return msgspec.structs.replace(grammar, frame=frame)
