"""Conversations to token ids: chooses the template, renders, and encodes.

Exactly what transformers' ``apply_chat_template(tokenize=True)`` gives, but for one thing: the text
of a special token that a client typed (in a message, a tool, a document) is encoded as plain text,
so that nobody can end a turn or begin a system turn from within a message.

How. If no string of the conversation holds the text of a special token, there is nothing to do,
and the rendered text is encoded as a whole. Otherwise every such text is put between two marks,
characters that occur nowhere in the conversation, before the template sees it. The template copies
them along; the rendered text is cut at the marks, and what stood between two of them is encoded
with special tokens switched off. What the template itself wrote is encoded as ever. Where a
template cuts a marked text in two, the lone marks keep the halves, encoded apart, from becoming a
token.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateSyntaxError

from zlm.errors import BadRequest, ConfigError
from zlm.messages import ChatPrompt
from zlm.tokenizer.template_environment import compile_template
from zlm.tokenizer.template_process import TemplateProcess
from zlm.tokenizer.template_render import Conversation, render
from zlm.tokenizer.vocabulary import Vocabulary

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
# Noncharacters, then a private plane: never part of real text, and there are more of them than
# any conversation can use up.
_MARK_RANGES = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation. ``pieces``: text, and whether it is to be taken as plain text."""

    text: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)  # empty: encode the whole text


class ChatRenderer:
    """Renders and encodes conversations for one vocabulary."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        seconds: float,
        allow_special_tokens: bool = False,
        pools: bool = False,
        trusts_requests: bool = False,
    ) -> None:
        """*seconds* bounds one rendering; *allow_special_tokens* honours those clients type.

        *pools*, *trusts_requests*: the model gives vectors, requests may bring templates: for what
        is said where there is no template.
        """
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._pattern = None if allow_special_tokens else vocabulary.special_pattern
        self._apart = TemplateProcess()
        self._no_template = (
            "this model has no chat template, so it cannot chat: start the server with "
            "--chat-template (a file or the template itself)"
            + (", send chat_template" if trusts_requests else "")
            + (", or send input (to /tokenize: prompt)" if pools else ", or use /v1/completions")
        )

    def check_template(self) -> None:
        """Raise ConfigError if the template that ``--chat-template`` gave is not a template."""
        try:
            compile_template(self._vocabulary.chat_templates["default"])
        except TemplateSyntaxError as error:
            message = f"--chat-template is not valid: {error.message} (line {error.lineno})"
            raise ConfigError(message) from error

    def render(self, chat: ChatPrompt) -> RenderedChat:
        """Return the text of *chat*; BadRequest as ``template_render.render`` and without one."""
        if chat.add_generation_prompt and chat.continue_final_message:
            message = "add_generation_prompt and continue_final_message cannot both be true"
            raise BadRequest(message, param="continue_final_message")
        for name in chat.template_kwargs or ():
            if name in _RESERVED:
                message = f"chat_template_kwargs must not set {name}, which has a field of its own"
                raise BadRequest(message, param="chat_template_kwargs")
        template, trusted = self._choose(chat)
        data = (chat.messages, chat.tools, chat.documents, chat.template_kwargs)
        typed = self._pattern is not None and any(map(self._pattern.search, _strings(data)))
        marks = _free_characters(data, 3) if typed or chat.continue_final_message else ["", "", ""]
        if typed:
            data = self._marked(data, marks[0], marks[1])
        messages, tools, documents, keywords = data
        conversation = Conversation(
            template=template,
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=chat.add_generation_prompt,
            variables={**self._vocabulary.special_tokens, **(keywords or {})},
            end_mark=marks[2] if chat.continue_final_message else "",
            seconds=self._seconds,
        )
        text = render(conversation) if trusted else self._apart.render(conversation)
        return _cut_at_marks(text, marks[0], marks[1]) if typed else RenderedChat(text)

    def encode(self, rendered: RenderedChat, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of *rendered*."""
        vocabulary = self._vocabulary
        if not rendered.pieces:
            return vocabulary.encode(rendered.text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        for i, (text, plain) in enumerate(rendered.pieces):
            if plain:
                ids += vocabulary.encode_typed(text)
            else:
                ids += vocabulary.encode_inside(text) if i else vocabulary.encode(text)
        return vocabulary.surround(ids) if add_special_tokens else ids

    def template_of(self, chat: ChatPrompt) -> str:
        """Return the template that *chat* is rendered with; BadRequest if there is none."""
        return self._choose(chat)[0]

    def close(self) -> None:
        """End the process that renders clients' templates, if one was started."""
        self._apart.close()

    def _choose(self, chat: ChatPrompt) -> tuple[str, bool]:
        """Return the template to use and whether it is our own."""
        templates = self._vocabulary.chat_templates
        if chat.chat_template is not None:
            if chat.chat_template in templates:
                return templates[chat.chat_template], True
            return chat.chat_template, chat.chat_template in templates.values()
        if chat.tools and "tool_use" in templates:
            return templates["tool_use"], True
        if "default" not in templates:
            raise BadRequest(self._no_template, param="messages")
        return templates["default"], True

    def _marked(self, value: Any, opening: str, closing: str, key: str = "") -> Any:
        """Return *value* with every special token's text in it put between the two marks."""
        if isinstance(value, str):
            if self._pattern is None or (key == "role" and value in _ROLES):
                return value
            return self._pattern.sub(lambda m: f"{opening}{m[0]}{closing}", value)
        if isinstance(value, dict):
            return {
                self._marked(k, opening, closing): self._marked(v, opening, closing, k)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(item, opening, closing) for item in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in *value*, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _free_characters(value: Any, count: int) -> list[str]:
    """Return characters that occur in no string of *value*."""
    used: set[str] = set()
    for text in _strings(value):
        used.update(text)
    free = (chr(code) for codes in _MARK_RANGES for code in codes if chr(code) not in used)
    return [character for _, character in zip(range(count), free, strict=False)]


def _cut_at_marks(text: str, opening: str, closing: str) -> RenderedChat:
    pieces: list[tuple[str, bool]] = []
    for piece in re.split(f"({opening}[^{opening}{closing}]*{closing})|[{opening}{closing}]", text):
        if not piece:
            continue
        if piece[0] == opening:
            pieces.append((piece[1:-1], True))
        else:
            pieces.append((piece, False))
    plain = "".join(piece for piece, _ in pieces)
    return RenderedChat(plain, pieces or [("", False)])
