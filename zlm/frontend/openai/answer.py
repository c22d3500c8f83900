"""What both kinds of answer have: id, time, model name, usage. Pure."""

import secrets
import time
from typing import Any, Protocol

import msgspec

from zlm import __version__
from zlm.messages import Delta

SYSTEM_FINGERPRINT = f"zlm-{__version__}"


class AnswerHead(msgspec.Struct, frozen=True):
    """Fields that stand in front of every answer and every chunk of it."""

    id: str
    created: int  # seconds since the epoch
    model: str  # the name the client asked for

    @classmethod
    def new(cls, prefix: str, model: str) -> "AnswerHead":
        """Make a fresh id that starts with *prefix*."""
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields as they stand in JSON; *kind* is the object's name."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }


class Usage:
    """Counts the tokens of one request: prompts once each, outputs of all samples."""

    __slots__ = ("_cached", "_outputs", "_prompts", "_samples")

    def __init__(self, num_choices: int, samples: int) -> None:
        self._samples = samples
        self._outputs = [0] * num_choices
        self._prompts = [0] * (num_choices // samples)
        self._cached = [0] * (num_choices // samples)

    def count(self, delta: Delta) -> None:
        """Take in the counts that *delta* brings; they are totals, not increments."""
        index = delta.index
        self._outputs[index] = delta.num_output_tokens
        prompt, sample = divmod(index, self._samples)
        self._prompts[prompt] = delta.num_prompt_tokens
        if sample == 0:  # later samples share the prompt's blocks, which is no cache hit
            self._cached[prompt] = delta.num_cached_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(self._outputs)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    def body(self) -> dict[str, Any]:
        """Return the ``usage`` object."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerForm(Protocol):
    """How the deltas of one request become JSON. One object a request: it may keep offsets."""

    id: str  # of the answer

    def chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Return a stream's chunk for *delta*; *first* is the first of its choice."""

    def text_chunk(self, index: int, text: str) -> dict[str, Any]:
        """Return the chunk for a delta of choice *index* that carries nothing but *text*."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that closes a stream with include_usage."""

    def answer(self, deltas: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer; *deltas* are one a choice, in the order of their indices."""
