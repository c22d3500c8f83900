"""A load test of one server: its text measured, then level by level a warm-up and a load.

Knows nothing of flags, tables and reports.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from zlm.errors import ConfigError, Internal
from zlm.loadtest import processes
from zlm.loadtest.client import Client, Progress, Server, Work
from zlm.loadtest.figures import figures
from zlm.loadtest.plan import ENDPOINTS, ONE, Conversation, Lengths, Limits, Pace, Shape, Turn
from zlm.loadtest.prompts import CHARACTERS_A_TOKEN, WORDS, Scale, Source, read
from zlm.loadtest.stream import Record

WARM_UP_TOKENS = (128, 32)  # most of input and output
MOST_WARM_UPS = 64
PROBE_WORDS = (20, 60)
PROBE_CHARACTERS = (200, 800)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole test: what is sent, at which paces, how much of it."""

    shape: Shape
    source: Source
    paces: tuple[Pace, ...]
    requests: int | None = None  # conversations of a level; None: as the next two say
    requests_each: float = 4.0  # of each client of a closed loop
    seconds: float = 30.0  # of an open loop's arrivals
    warm_up: int | None = None  # requests before each level; None: one for each client
    think_seconds: float = 0.0
    limits: Limits | None = None
    processes: int = 1
    dataset: Path | None = None

    def number(self, pace: Pace) -> int:
        """Return how many conversations a level has."""
        if self.requests is not None:
            return self.requests
        if pace.is_open:
            return max(1, round(pace.request_rate * self.seconds))
        return max(pace.concurrency, round(pace.concurrency * self.requests_each))


@dataclass(frozen=True, slots=True)
class Level:
    """What one level was and came to."""

    pace: Pace
    figures: dict[str, Any]
    records: list[Record] = field(repr=False)


def prepared(server: Server, plan: Plan) -> Plan:
    """Return *plan* with its text measured on *server* and its file read.

    Raises ConfigError for a file that does not fit, Internal if the server does not answer.
    """
    source = plan.source
    if plan.dataset is None:
        if source.as_ids:
            return plan
        counts = [_input_tokens(server, plan.shape, " ".join(WORDS[:n])) for n in PROBE_WORDS]
        words = Scale.between(PROBE_WORDS, (counts[0], counts[1]))
        return replace(plan, source=replace(source, words=words))
    rough = samples(plan)
    text = " ".join(turn.prompt for talk in rough for turn in talk if isinstance(turn.prompt, str))
    scale = Scale(1 / CHARACTERS_A_TOKEN)
    if len(text) >= PROBE_CHARACTERS[1]:
        counts = [_input_tokens(server, plan.shape, text[:n]) for n in PROBE_CHARACTERS]
        scale = replace(Scale.between(PROBE_CHARACTERS, (counts[0], counts[1])), offset=0.0)
    return replace(plan, source=replace(source, samples=read(plan.dataset, scale)))


def samples(plan: Plan) -> list[Conversation]:
    """Return what is in the file of *plan*, its tokens by a rule of thumb.

    Raises ConfigError unless the endpoint takes every prompt and some have the turns wanted.
    """
    if plan.dataset is None:
        return []
    found = read(plan.dataset, Scale(1 / CHARACTERS_A_TOKEN))
    endpoint, turns = plan.shape.endpoint, plan.source.turns
    longest = max(map(len, found))
    if turns != ONE and (longest == 1 or longest < turns.low):
        raise ConfigError(f"--turns {turns}: the longest conversation of --dataset has {longest}")
    refused = dict if endpoint == "completions" else int
    for talk in found:
        for turn in talk:
            if isinstance(turn.prompt, list) and isinstance(turn.prompt[0], refused):
                form = "messages" if refused is dict else "token ids"
                raise ConfigError(f"--dataset: {form} are not for --endpoint {endpoint}")
    return found


def _input_tokens(server: Server, shape: Shape, text: str) -> int:
    """Return how many tokens *server* counts in a request of *text*."""
    shape = replace(shape, is_streamed=False, ignore_eos=False)
    turn = Turn(text, 0, 1)
    record = Record(1)

    async def ask() -> None:
        client = Client(server)
        request = server.post(ENDPOINTS[shape.endpoint], shape.body([], turn))
        await client.ask(request, record, streamed=False)
        client.close()

    uvloop.run(ask())
    if record.error:
        raise Internal(f"the server cannot be measured: {record.error}: {record.detail}")
    return record.input_tokens or len(text.split())


def levels(server: Server, plan: Plan, seed: str, tell: Progress | None = None) -> Iterator[Level]:
    """Measure every level of *plan*, warmed up; raises Internal when a warm-up gets no answer.

    *seed* makes the prompts: with the same one a server's prefix cache may have met them. *tell* is
    told of a level's progress.
    """
    for at, asked in enumerate(plan.paces):
        rng = random.Random(f"{seed}/{at}")
        number = plan.number(asked)
        pace = asked.within(number)
        _warm_up(server, plan, pace, rng)
        talks = plan.source.conversations(number, rng)
        work = Work(server, plan.shape, pace, talks, pace.arrivals(number, rng), plan.think_seconds)
        seen = processes.run(work, plan.processes, tell)
        found = figures(seen, pace, plan.limits, streamed=plan.shape.is_streamed)
        if pace != asked:
            found["asked_conc"] = asked.concurrency
        lengths = {"prompt": str(plan.source.input), "output": str(plan.source.output or "file")}
        yield Level(pace, found | _numbers(lengths), seen.records)


def _numbers(lengths: dict[str, str]) -> dict[str, Any]:
    return {name: int(text) if text.isdigit() else text for name, text in lengths.items()}


def _warm_up(server: Server, plan: Plan, pace: Pace, rng: random.Random) -> None:
    """Send short random requests, all at once."""
    number = plan.warm_up
    if number is None:
        clients = math.ceil(pace.request_rate) if pace.is_open else plan.number(pace)
        number = min(MOST_WARM_UPS, pace.concurrency or clients)
    if number == 0:
        return
    most_input, most_output = WARM_UP_TOKENS
    output = plan.source.output or Lengths("fixed", most_output)
    short = replace(
        plan.source,
        input=plan.source.input.cut(most_input),
        output=output.cut(most_output),
        turns=Lengths("fixed", 1),
        samples=(),
        prefix_tokens=0,
    )
    talks = short.conversations(number, rng)
    at_once = Pace(concurrency=number)
    work = Work(server, plan.shape, at_once, talks, at_once.arrivals(number, rng))
    found = figures(processes.run(work, 1), at_once)
    if not found["ok"]:
        raise Internal(f"the warm-up requests failed: {found['err']}")
