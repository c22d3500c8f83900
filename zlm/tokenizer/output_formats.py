"""Which formats of tool calls and reasoning a model has: told by flag, or by its chat template.

A template writes the calls and thoughts of earlier turns as the model was taught to, so the texts
that stand around them are in it. One parser is made for each choice.
"""

from dataclasses import dataclass
from functools import lru_cache

from zlm.messages import ChatPrompt, Generate, Grammar
from zlm.tokenizer.chat_template import ChatRenderer
from zlm.tokenizer.grammar_frames import GrammarFrames
from zlm.tokenizer.output_grammars import Place, tools_of, whole_grammar
from zlm.tokenizer.output_known import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from zlm.tokenizer.output_parser import OutputParser
from zlm.tokenizer.output_parts import OutputParts
from zlm.tokenizer.tools_schemas import Functions
from zlm.tokenizer.vocabulary import Vocabulary

# vLLM's names of parsers, beside our own.
TOOL_PARSER_NAMES = {name: name for name in TOOL_FORMATS} | {
    "qwen": "hermes",
    "ernie45": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "llama3_pythonic": "pythonic",
    "gemma": "functiongemma",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "deepseek_v31": "deepseek_v3",
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
    "xlam": "json",
    "jamba": "tool_calls",
    "minimax": "tool_calls",
    "hunyuan_a13b": "tool_calls",
}
REASONING_PARSER_NAMES = {name: name for name in REASONING_FORMATS} | {
    "qwen3": "think",
    "glm45": "think",
    "holo2": "think",
    "deepseek_v3": "think",
    "kimi_k2": "think",
    "minimax_m2": "think",
    "ernie45": "think",
    "olmo3": "think",
    "openai_gptoss": "harmony",
}
# The first text that a template has decides.
_TOOL_SIGNS = (
    ("<|channel|>analysis", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("｜DSML｜", "deepseek_v32"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<parameter=", "qwen3_coder"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call|>", "granite"),
    ("<|/tool|>", "phi4_mini"),
    ("<|START_ACTION|>", "cohere"),
    ("<function_calls>", "olmo3"),
    ("<TOOLCALL>", "nemotron"),
    ("<tool_calls>", "tool_calls"),
    ("<|action_start|>", "internlm"),
    ("functools[", "functools"),
    ("<|im_middle|>", "kimi_k2"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)
_REASONING_SIGNS = (
    ("<|channel|>analysis", "harmony"),
    ("[THINK]", "mistral"),
    ("<|channel>", "gemma4"),
    ("<seed:think>", "seed_oss"),
    ("<|START_THINKING|>", "cohere"),
    ("Here is my thought process", "granite"),
    ("[BEGIN FINAL RESPONSE]", "apriel"),
    ("</think>", "think"),
    ("<think>", "think"),
)
_TAIL_TOKENS = 64  # of a prompt, in which its end surely stands


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
    grammar: what the output must be, thoughts and all.
    """

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    shown: frozenset[int]
    in_reasoning: bool
    functions: Functions
    most_calls: int | None
    named: bool
    nine_letter_ids: bool
    drops_reasoning: bool
    grammar: Grammar | None = None

    def parts(self) -> OutputParts:
        """Return what sorts the text of one choice."""
        parser = OutputParser(
            self.reasoning,
            self.tools,
            functions=self.functions,
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
    """The formats of one model. *tool_parser* and *reasoning_parser*: flags; None: find out.

    *end_ids* end a text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        renderer: ChatRenderer,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
        end_ids: tuple[int, ...] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._renderer = renderer
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._frames = GrammarFrames(vocabulary, end_ids)

    def plan(
        self, message: Generate, prompt_ids: list[int], *, grammar: Grammar | None = None
    ) -> OutputPlan | None:
        """Return how *message*'s output is parsed, None if all of it is content.

        *grammar* holds what comes behind the thoughts; with tool_choice auto a call may stand in
        its place, in formats that show where one begins.
        """
        if message.chat is None or not message.params.detokenize:
            return None
        template = self._renderer.template_of(message.chat)
        reasoning = self._reasoning(template) if message.split_reasoning else None
        place: Place = "before"
        if reasoning is not None:
            place = self._place(message.chat, prompt_ids, reasoning)
            if place == "behind":
                reasoning = reasoning._replace(assumed=False)
        native = TOOL_FORMATS[self._tool_name(template)]
        tools = tools_of(message, native, place)
        if reasoning is None and tools is None:
            return None
        if grammar is not None:
            grammar = whole_grammar(self._frames, message, grammar, reasoning, tools, place)
        options = message.tools
        named = options is not None and options.choice == "named"
        return OutputPlan(
            reasoning=reasoning,
            tools=tools,
            shown=self._shown(reasoning, tools),
            in_reasoning=place == "within",
            functions=Functions(options.names if options else (), message.chat.tools),
            most_calls=1 if options is not None and (named or not options.parallel) else None,
            named=named,
            nine_letter_ids=native.nine_letter_ids,
            drops_reasoning=message.drop_reasoning,
            grammar=grammar,
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
            texts += [reasoning.opening, reasoning.closing, *reasoning.markers]
        special = self._vocabulary.special_ids
        names = {i: self._vocabulary.token(i) for i in special}
        return frozenset(i for i, name in names.items() if name and any(name in t for t in texts))

    def _place(self, chat: ChatPrompt, prompt_ids: list[int], reasoning: ReasoningFormat) -> Place:
        """Tell where the prompt ends."""
        opening, closing = reasoning.opening.rstrip(), reasoning.closing
        if chat.continue_final_message:
            content = chat.messages[-1].get("content") if chat.messages else ""
            text = content if isinstance(content, str) else ""
            return "within" if opening and text.rfind(opening) > text.rfind(closing) else "behind"
        if not opening:
            return "before"
        tail = self._vocabulary.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        if tail.rstrip().endswith(opening):
            return "within"
        return "behind" if tail.rstrip().endswith(closing) else "before"


def unread_grammar(message: Generate, grammar: Grammar | None) -> Grammar | None:
    """Return what an output follows in which nobody looks for thoughts or calls."""
    free = message.tools is not None and message.tools.choice == "auto"
    return None if free and grammar is message.grammar else grammar
