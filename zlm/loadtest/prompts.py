"""The prompts of a load test: random token ids, random words, or a file's.

Random ids have exactly the tokens that are wanted. Text has as many as the server's tokenizer makes
of it, which a ``Scale``, measured on the server, foretells. Drawn anew from a seed for every level,
so that no prompt is in a prefix cache unless a shared prefix is wanted.
"""

import json
import random
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zlm.errors import ConfigError, clip
from zlm.loadtest.plan import ONE, Conversation, Lengths, Turn

FIRST_ID = 100  # special tokens mostly come before
COMMON_VOCAB = 30_000  # what nearly every model has
DEFAULT_OUTPUT = 128  # tokens, of a request in a file that says nothing
CHARACTERS_A_TOKEN = 4.0  # of English, where the server does not tell
HUMAN = ("human", "user")
COMMON = """\
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason"""
WORDS = tuple(COMMON.split())  # mostly one token each


@dataclass(frozen=True, slots=True)
class Scale:
    """How many tokens the server makes of text: ``offset + per_unit * units``."""

    per_unit: float = 1.0
    offset: float = 0.0  # a chat template's share

    @classmethod
    def between(cls, units: tuple[int, int], tokens: tuple[int, int]) -> "Scale":
        """Return the scale through two measured texts."""
        per_unit = (tokens[1] - tokens[0]) / (units[1] - units[0])
        return cls(per_unit, tokens[0] - per_unit * units[0]) if per_unit > 0 else cls()

    def units(self, tokens: int) -> int:
        """Return how many units of text come nearest to *tokens*, at least 1."""
        return max(1, round((tokens - self.offset) / self.per_unit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where conversations come from."""

    input: Lengths
    output: Lengths | None  # None: what a file's requests say
    turns: Lengths = ONE
    as_ids: bool = False
    vocab: int = COMMON_VOCAB  # token ids are below it
    prefix_tokens: int = 0  # before the input, the same for all of a prefix's requests
    num_prefixes: int = 1
    words: Scale = Scale()
    samples: Sequence[Conversation] = ()  # the file's

    def conversations(self, number: int, rng: random.Random) -> list[Conversation]:
        """Return *number* conversations; a file's in random order, again if few."""
        if not self.samples:
            prefixes = [self._piece(self.prefix_tokens, rng) for _ in range(self.num_prefixes)]
            return [self._random(prefixes, rng) for _ in range(number)]
        order: list[Conversation] = []
        while len(order) < number:
            order += rng.sample(self.samples, len(self.samples))
        return [self._with_lengths(talk, rng) for talk in order[:number]]

    def _random(self, prefixes: Sequence[Any], rng: random.Random) -> Conversation:
        turns = []
        for at in range(self.turns.draw(rng)):
            tokens = self.input.draw(rng)
            prompt = self._piece(tokens, rng)
            if at == 0 and self.prefix_tokens:
                prefix = rng.choice(prefixes)
                prompt = prefix + prompt if self.as_ids else f"{prefix} {prompt}"
                tokens += self.prefix_tokens
            assert self.output is not None
            turns.append(Turn(prompt, tokens, self.output.draw(rng)))
        return tuple(turns)

    def _piece(self, tokens: int, rng: random.Random) -> Any:
        """Return *tokens* random token ids, or words that come to as many."""
        if self.as_ids:
            return rng.choices(range(min(FIRST_ID, self.vocab // 2), self.vocab), k=tokens)
        return " ".join(rng.choices(WORDS, k=self.words.units(tokens))) if tokens else ""

    def _with_lengths(self, talk: Conversation, rng: random.Random) -> Conversation:
        turns = []
        for turn in talk[: self.turns.draw(rng)]:
            wanted = self.output.draw(rng) if self.output is not None else turn.output_tokens
            turns.append(replace(turn, output_tokens=wanted))
        return tuple(turns)


def read(path: Path, scale: Scale) -> list[Conversation]:
    """Return the conversations of a ShareGPT file or of JSON lines.

    ShareGPT: ``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]``, or
    such an object a line. JSON lines: ``{"prompt": ...}`` (text or token ids) or ``{"messages":
    [...]}``, with ``output_tokens`` or ``max_tokens`` if the answer's length is given. Answers'
    lengths are otherwise those in the file, by *scale*. Raises ConfigError, naming the line, or the
    entry of a list.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror}") from error
    found = []
    for where, row in _rows(data, f"--dataset {path}"):
        try:
            talk = tuple(_turns(row, scale))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if talk:
            found.append(talk)
    if not found:
        raise ConfigError(
            f"--dataset {path}: no request, and no conversation that begins with a question and "
            "its answer"
        )
    return found


def _rows(data: bytes, name: str) -> Iterator[tuple[str, Any]]:
    """Yield where in the file *name* each row is, for errors, and the row."""
    if data.removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
        for number, row in enumerate(_decoded(data, name), 1):
            yield f"{name}: entry {number}", row
        return
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            where = f"{name}: line {number}"
            yield where, _decoded(line, where)


def _decoded(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error


def _turns(row: Any, scale: Scale) -> Iterator[Turn]:
    """Yield the turns of *row*; raises ValueError with what is wanted."""
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, got {clip(repr(row))}")
    if "conversations" not in row:
        yield _request(row, scale)
        return
    said = row["conversations"]
    if not isinstance(said, list) or not all(map(_is_said, said)):
        raise ValueError('conversations must be a list of {"from": "human", "value": "text"}')
    for question, answer in zip(said[::2], said[1::2], strict=False):
        if question["from"] not in HUMAN or not question["value"] or not answer["value"]:
            return
        text = question["value"]
        yield Turn(text, _tokens(text, scale), _tokens(answer["value"], scale))


def _is_said(each: Any) -> bool:
    return (
        isinstance(each, dict) and "from" in each and isinstance(each.get("value", 0), str | None)
    )


def _request(row: dict[str, Any], scale: Scale) -> Turn:
    output = row.get("output_tokens") or row.get("max_tokens") or DEFAULT_OUTPUT
    if not isinstance(output, int | float) or not 1 <= output < 2**31:
        raise ValueError(f"output_tokens must be at least 1, got {clip(repr(output))}")
    prompt = row.get("messages", row.get("prompt"))
    if isinstance(prompt, str) and prompt:
        return Turn(prompt, _tokens(prompt, scale), int(output))
    if not isinstance(prompt, list) or not prompt:
        got = clip(repr(prompt))
        raise ValueError(f"must have prompt, messages or conversations, not empty, got {got}")
    if all(isinstance(token, int) for token in prompt):
        return Turn(prompt, len(prompt), int(output))
    if not all(isinstance(message, dict) and "content" in message for message in prompt):
        raise ValueError("must have a prompt of text or token ids, or messages with content")
    text = "".join(str(message["content"]) for message in prompt)
    return Turn(prompt, _tokens(text, scale), int(output))


def _tokens(text: str, scale: Scale) -> int:
    return max(1, round(scale.offset + scale.per_unit * len(text)))
