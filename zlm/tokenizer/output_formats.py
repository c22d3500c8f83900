"""Which formats of tool calls and reasoning a model has: told by flag, or by its chat template.

A template writes the calls and thoughts of earlier turns as the model was taught to, so the texts
that stand around them are in it. One parser is made for each choice.
"""

from dataclasses import dataclass
from functools import lru_cache

from zlm.messages import ChatPrompt, Generate
from zlm.tokenizer.chat_template import ChatRenderer
from zlm.tokenizer.output_parser import (
    NAMED,
    REASONING_FORMATS,
    REQUIRED,
    TOOL_FORMATS,
    OutputParser,
    ReasoningFormat,
    ToolFormat,
)
from zlm.tokenizer.output_parts import OutputParts
from zlm.tokenizer.vocabulary import Vocabulary

# vLLM's names of parsers, beside our own.
TOOL_PARSER_NAMES = {name: name for name in TOOL_FORMATS} | {
    "qwen": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "llama3_pythonic": "pythonic",
    "gemma": "functiongemma",
}
REASONING_PARSER_NAMES = {name: name for name in REASONING_FORMATS} | {
    "qwen3": "think",
    "glm45": "think",
    "holo2": "think",
}
# The first text that a template has decides.
_TOOL_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)
_REASONING_SIGNS = (
    ("[THINK]", "mistral"),
    ("<|channel>", "gemma4"),
    ("</think>", "think"),
    ("<think>", "think"),
)
_TAIL_TOKENS = 16  # of a prompt, in which its end surely stands


@lru_cache(maxsize=32)
def tool_format(template: str) -> str:
    """Return the name of the format in which a model with *template* writes calls."""
    return next((name for sign, name in _TOOL_SIGNS if sign in template), "json")


@lru_cache(maxsize=32)
def reasoning_format(template: str) -> str | None:
    """Return the name of the format in which a model with *template* thinks, if it does."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), None)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the choices of one request are parsed.

    shown: ids of special tokens that the formats need as text.
    """

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    shown: frozenset[int]
    in_reasoning: bool
    names: tuple[str, ...]
    most_calls: int | None
    named: bool
    nine_letter_ids: bool
    drops_reasoning: bool

    def parts(self) -> OutputParts:
        """Return what sorts the text of one choice."""
        parser = OutputParser(
            self.reasoning,
            self.tools,
            known=self.names,
            in_reasoning=self.in_reasoning,
            most_calls=self.most_calls,
        )
        return OutputParts(
            parser,
            named=self.named,
            nine_letter_ids=self.nine_letter_ids,
            drops_reasoning=self.drops_reasoning,
        )


class OutputFormats:
    """The formats of one model. *tool_parser* and *reasoning_parser*: flags; None: find out."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        renderer: ChatRenderer,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._renderer = renderer
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def plan(
        self, message: Generate, prompt_ids: list[int], *, constrained: bool = False
    ) -> OutputPlan | None:
        """Return how *message*'s output is parsed, None if all of it is content.

        *constrained*: a grammar holds the output from its first token on, so there are no thoughts,
        nor calls but those that the grammar is for.
        """
        if message.chat is None or not message.params.detokenize:
            return None
        template = self._renderer.template_of(message.chat)
        splits = message.split_reasoning and not constrained
        reasoning = self._reasoning(template) if splits else None
        options = message.tools
        tools: ToolFormat | None = None
        native = TOOL_FORMATS[self._tool_name(template)]
        if options is not None:
            auto = None if constrained else native
            tools = {"required": REQUIRED, "named": NAMED}.get(options.choice, auto)
        if reasoning is None and tools is None:
            return None
        named = options is not None and options.choice == "named"
        opened = reasoning is not None and self._opened(message.chat, prompt_ids, reasoning)
        return OutputPlan(
            reasoning=reasoning,
            tools=tools,
            shown=self._shown(reasoning, tools),
            in_reasoning=opened,
            names=() if options is None else tuple(options.names),
            most_calls=1 if options is not None and (named or not options.parallel) else None,
            named=named,
            nine_letter_ids=native.nine_letter_ids,
            drops_reasoning=message.drop_reasoning,
        )

    def _tool_name(self, template: str) -> str:
        return TOOL_PARSER_NAMES[self._tool_parser or tool_format(template)]

    def _reasoning(self, template: str) -> ReasoningFormat | None:
        name = self._reasoning_parser or reasoning_format(template)
        if name is None or name == "none":
            return None
        return REASONING_FORMATS[REASONING_PARSER_NAMES[name]]

    def _shown(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> frozenset[int]:
        texts = list(tools.markers) if tools is not None else []
        if reasoning is not None:
            # A tag of several tokens, such as <|channel>thought, begins or ends with a special one.
            texts += [reasoning.opening, reasoning.closing]
        special = self._vocabulary.special_ids
        names = {i: self._vocabulary.token(i) for i in special}
        return frozenset(i for i, name in names.items() if name and any(name in t for t in texts))

    def _opened(self, chat: ChatPrompt, prompt_ids: list[int], reasoning: ReasoningFormat) -> bool:
        """Tell whether the prompt ends within thoughts."""
        opening = reasoning.opening.rstrip()
        if chat.continue_final_message:
            content = chat.messages[-1].get("content") if chat.messages else ""
            text = content if isinstance(content, str) else ""
            return text.rfind(opening) > text.rfind(reasoning.closing)
        tail = self._vocabulary.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(opening)
