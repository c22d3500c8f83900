"""What a load test sends, and when: lengths, arrivals, the shape of every request.

Values and pure functions; all chance comes from the generator that is passed in. Knows no socket,
no clock and no file.
"""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

from zlm.errors import ConfigError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONSTANT = math.inf  # burstiness of evenly spaced arrivals


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers of at least 1: fixed, uniform or normal."""

    kind: str
    low: float  # the value; the least; the mean
    high: float = 0.0  # -; the greatest; the standard deviation

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read ``128``, ``uniform:64:256`` (or ``64-256``) or ``normal:MEAN:DEVIATION``.

        Raises ValueError with what is wanted.
        """
        wanted = "must be N, uniform:LEAST:MOST or normal:MEAN:DEVIATION, of at least 1"
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        if kind == "fixed" and "-" in text:
            kind, numbers = "uniform", text.split("-")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            raise ValueError(wanted) from None
        if kind not in ("fixed", "uniform", "normal") or len(values) != 1 + (kind != "fixed"):
            raise ValueError(wanted)
        lengths = cls(kind, *values)
        is_ordered = kind != "uniform" or lengths.high >= lengths.low
        if (
            not all(map(math.isfinite, values))
            or values[0] < 1
            or min(values) < 0
            or not is_ordered
        ):
            raise ValueError(wanted)
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        if self.kind == "uniform":
            return rng.randint(round(self.low), round(self.high))
        if self.kind == "normal":
            return max(1, round(rng.gauss(self.low, self.high)))
        return round(self.low)

    def cut(self, most: int) -> "Lengths":
        """Return this distribution's centre, *most* at most, as a fixed length."""
        centre = (self.low + self.high) / 2 if self.kind == "uniform" else self.low
        return Lengths("fixed", min(round(centre), most))

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.low:g}"
        return f"{self.kind}:{self.low:g}:{self.high:g}"


ONE = Lengths("fixed", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all requests of a test have in common."""

    model: str
    endpoint: str = "completions"
    ignore_eos: bool = True  # each answer then has the tokens that were asked for, or is a fault
    is_streamed: bool = True
    fields: dict[str, Any] = field(default_factory=dict)  # more of every body

    def body(self, history: list[dict[str, str]], turn: "Turn") -> dict[str, Any]:
        """Return the body of one request: *turn* after what was said before it."""
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            body["messages"] = [*history, *turn.as_messages()]
        elif history:
            before = [message["content"] for message in history]
            body["prompt"] = "\n".join([*before, str(turn.prompt)])
        else:
            body["prompt"] = turn.prompt
        body["max_tokens"] = turn.output_tokens
        body["temperature"] = 0
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self.fields


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's own part."""

    prompt: str | list[int] | list[dict[str, Any]]  # text, token ids or messages
    input_tokens: int  # as planned; the server's usage is what counts
    output_tokens: int

    def as_messages(self) -> list[dict[str, Any]]:
        """Return the prompt as messages of a chat. Token ids have no such form."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        assert self.prompt and isinstance(self.prompt[0], dict), "token ids in a chat"
        return [message for message in self.prompt if isinstance(message, dict)]


Conversation = tuple[Turn, ...]  # most have one turn


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests come: so many a second, or so many at once, or both (then a cap)."""

    request_rate: float = math.inf  # a second
    concurrency: int = 0  # 0: no cap
    burstiness: float = 1.0  # shape of the gamma distribution between two arrivals; 1: Poisson

    @property
    def is_open(self) -> bool:
        """Whether arrivals are planned, so that times count from the planned moment."""
        return math.isfinite(self.request_rate)

    def within(self, number: int) -> "Pace":
        """Return what of this pace *number* conversations come to: no more of them at once."""
        if self.is_open or self.concurrency <= number:
            return self
        return replace(self, concurrency=number)

    def arrivals(self, number: int, rng: random.Random) -> list[float]:
        """Return when each of *number* conversations is to begin, seconds from the start."""
        if not self.is_open:
            return [0.0] * number
        mean, at, times = 1 / self.request_rate, 0.0, []
        for _ in range(number):
            times.append(at)
            is_even = self.burstiness == CONSTANT
            shape = self.burstiness
            at += mean if is_even else rng.gammavariate(shape, mean / shape)
        return times


@dataclass(frozen=True, slots=True)
class Limits:
    """An objective for each request (SLO), milliseconds by metric: ttft, tpot, e2e."""

    milliseconds: dict[str, float]

    @classmethod
    def parse(cls, words: list[str]) -> "Limits":
        """Read ``ttft:200 tpot:20``. Raises ConfigError."""
        limits = {}
        for word in words:
            name, _, number = word.partition(":")
            name = "e2e" if name == "e2el" else name
            try:
                limits[name] = float(number)
            except ValueError:
                limits[name] = math.nan
            if name not in ("ttft", "tpot", "e2e") or not 0 < limits[name] < math.inf:
                raise ConfigError(
                    f"--goodput {word}: must be ttft, tpot or e2e with milliseconds, as ttft:200"
                )
        return cls(limits)
