"""Puts a grammar where an answer's content stands: behind thoughts, or in place of a tool call.

A frame is Lark with ``@answer`` in it, in the dialect of the grammar library: special tokens by id,
``[suffix=...]`` for the shortest text up to a literal. It allows what the model's own format has
around an answer, and no end before there is one. Pure but for the vocabulary it looks at.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from zlm.engine.grammar import WHITE_SPACE
from zlm.messages import Grammar
from zlm.tokenizer.output_harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from zlm.tokenizer.output_known import ReasoningFormat
from zlm.tokenizer.vocabulary import Vocabulary

_ANY = "/(?s:.*)/"  # text without special tokens
_WHITE = r"[ \t\r\n]{0,8}"  # around thoughts
_SPACE = f"SPACE: /{_WHITE}/"
_HEAD = "commentary to=functions."  # what a call's channel is


class GrammarFrames:
    """Makes frames for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, end_ids: Iterable[int]) -> None:
        """*end_ids* end a text."""
        self._vocabulary = vocabulary
        ends = ",".join(map(str, end_ids))
        self._rest = f"rest: <[^{ends}]>*" if ends else "rest: <[*]>*"

    def around(
        self, reasoning: ReasoningFormat | None, *, opened: bool, calls: tuple[str, ...] = ()
    ) -> str:
        """Return the frame of an answer behind thoughts; empty if it stands alone.

        *opened*: the prompt has opened the thoughts. *calls*: what may stand in place of the
        answer, with anything behind it.
        """
        if reasoning is None and not calls:
            return ""
        start, rules = "@answer", []
        if calls:
            start = "(@answer | call)"
            openings = " | ".join(map(self._spelled, calls))
            rules += [f"call: ({openings}) rest", self._rest]
        if reasoning is not None:
            rules += [*self._up_to("thoughts", reasoning.closing), _SPACE]
            if opened or reasoning.assumed:
                start = f"thoughts SPACE {start}"
            else:
                start = f"(opening thoughts SPACE)? {start}"
                rules.append(self._opening(reasoning.opening))
        return "\n".join([f"start: {start}", *rules])

    def harmony(self, *, function: str | None = None, calls: bool = False) -> str:
        """Return the frame of an answer in harmony: its final message, or the arguments of a call.

        *function*: the one that is called. *calls*: any call may stand in place of the answer.
        """
        if function is not None:
            return self._harmony([self._call(function, "@answer")])
        last = [f'{self._spelled(CHANNEL)} "final" json? {self._spelled(MESSAGE)} @answer']
        if calls:
            last += [f"{self._spelled(CHANNEL)} {json.dumps(_HEAD)} rest", '" to=functions." rest']
        return self._harmony(last, [self._rest] if calls else [])

    def harmony_calls(self, calls: Grammar, *, forced: bool) -> Grammar:
        """Return the grammar of an answer in harmony that is one of *calls*, a list as JSON.

        Not *forced*: it may be any text as well.
        """
        whole: dict[str, Any] = json.loads(calls.text)
        last, rules = [], []
        for i, item in enumerate(whole["items"]["anyOf"]):
            properties = item["properties"]
            last.append(self._call(properties["name"]["const"], f"arguments{i}"))
            rules.append(f"arguments{i}: {_json(properties['arguments'], whole)}")
        if not forced:
            last.append(f'{self._spelled(CHANNEL)} "final" json? {self._spelled(MESSAGE)} {_ANY}')
        return Grammar("lark", self._harmony(last, rules, says=not forced))

    def calls_in_text(
        self,
        calls: Grammar,
        marks: tuple[str, str],
        reasoning: ReasoningFormat | None,
        *,
        opened: bool,
        forced: bool,
        heads: tuple[str, str] | None = None,
    ) -> Grammar:
        """Return the grammar of any text in which what stands between *marks* is of *calls*.

        That is one of the list that *calls* is as JSON, or the list itself. *forced*: there is no
        text but such calls, as many as the list may have. *heads*: a call may be its name, an id
        behind the first of them, or none, and its arguments behind the second, as well.
        """
        whole: dict[str, Any] = json.loads(calls.text)
        opening, closing = marks
        several = {key: whole[key] for key in ("type", "items", "minItems", "maxItems")}
        frame = self.around(reasoning, opened=opened) or "start: @answer"
        end = f"SPACE {self._spelled(closing)}" if closing else ""
        rules = [
            *frame.replace("@answer", "answer").split("\n"),
            f"called: SPACE (call{' | named' if heads else ''}) {end}",
            f"call: {_json({'anyOf': [whole['items'], several]}, whole)}",
            *(self._named(whole, *heads) if heads else ()),
        ]
        if forced:
            one, more = f"{self._spelled(opening)} called", whole["maxItems"] - 1
            again = f"(SPACE {one}){{0,{more}}}" if more else ""
            rules.append(f"answer: {one} {again}")
        else:
            rules += [f"answer: (said called)* {_ANY}", *self._up_to("said", opening)]
        if reasoning is None:
            rules.append(_SPACE)
        return Grammar("lark", "\n".join(rules))

    def call_of(
        self,
        function: str,
        marks: tuple[str, str],
        reasoning: ReasoningFormat | None,
        *,
        opened: bool,
    ) -> str:
        """Return the frame of a call of *function* between *marks*; the answer is its arguments."""
        opening, closing = marks
        frame = self.around(reasoning, opened=opened) or "start: @answer"
        head = json.dumps(f'{{"name": "{function}", "arguments": ')
        end = f"SPACE {self._spelled(closing)}" if closing else ""
        call = f'{self._spelled(opening)} SPACE {head} @answer "}}" {end}'
        rules = [frame.replace("@answer", call), *([_SPACE] if reasoning is None else ())]
        return "\n".join(rules)

    def _named(self, whole: dict[str, Any], before_id: str, before_arguments: str) -> list[str]:
        """Return the rules of a call of the list *whole* as its name and its arguments."""
        number = f"({self._spelled(before_id)} /[A-Za-z0-9]{{1,40}}/)?"
        head = f"{number} {self._spelled(before_arguments)} SPACE"
        each, rules = [], []
        for i, item in enumerate(whole["items"]["anyOf"]):
            properties = item["properties"]
            each.append(f"{json.dumps(properties['name']['const'])} {head} arguments{i}")
            rules.append(f"arguments{i}: {_json(properties['arguments'], whole)}")
        return [f"named: {' | '.join(each)}", *rules]

    def _harmony(
        self, last: list[str], rules: list[str] | None = None, *, says: bool = False
    ) -> str:
        """*says*: the model may speak to the user before the last message."""
        channel, message = self._spelled(CHANNEL), self._spelled(MESSAGE)
        again = f'{self._spelled(START)} "assistant"'
        channels = '("analysis" | "commentary")' if says else '"analysis"'
        return "\n".join(
            [
                f"start: message* ({' | '.join(last)})",
                f"message: {channel} {channels} {message} said {again}",
                f'json: " "? {self._spelled(CONSTRAIN)} "json"',
                *self._up_to("said", END),
                *(rules or ()),
            ]
        )

    def _call(self, function: str, arguments: str) -> str:
        head = json.dumps(f"{_HEAD}{function}")
        return f"{self._spelled(CHANNEL)} {head} json? {self._spelled(MESSAGE)} {arguments}"

    def _opening(self, text: str) -> str:
        """Return the rule of *text* that is surely an opening, whatever else may begin so."""
        pieces = self._pieces(text)
        if len(pieces) == 1 and not pieces[0].startswith("<"):
            return f"opening[lazy]: /{_WHITE}{_escaped(text)}/"
        return f"opening: SPACE {' '.join(pieces)}"

    def _up_to(self, rule: str, closing: str) -> list[str]:
        """Return the rules of a text up to *closing* and that."""
        first, *others = self._pieces(closing)
        if first.startswith("<"):
            return [f"{rule}: {_ANY} {' '.join([first, *others])}"]
        shortest = f"{rule}_text[suffix={first}]: {_ANY}"
        return [f"{rule}: {' '.join([f'{rule}_text', *others])}", shortest]

    def _spelled(self, text: str) -> str:
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        """Return *text* as Lark: special tokens by id, all else as literals."""
        ids = {
            name: i
            for i in self._vocabulary.special_ids
            if (name := self._vocabulary.token(i)) and name in text
        }
        if not ids:
            return [json.dumps(text)]
        longest_first = sorted(ids, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part]


def _json(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return Lark of what fits *schema*, part of *root*, by whose definitions and options it is."""
    options = {"whitespace_pattern": WHITE_SPACE, **root.get("x-guidance", {})}
    whole = {**schema, "$defs": root.get("$defs", {}), "x-guidance": options}
    return f"%json {json.dumps(whole)}"


def _escaped(text: str) -> str:
    """Return *text* as part of a regex in Lark."""
    return "".join(c if c.isalnum() or c in " _" else f"\\x{{{ord(c):x}}}" for c in text)
