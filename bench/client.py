"""One closed-loop level of streamed completions of random token ids, for this folder's scripts.

The client is ``zlm.loadtest``, as ``zlm bench serve`` has it; each request has a connection of its
own here.
"""

import random
import time
from dataclasses import dataclass
from typing import Any

from zlm.loadtest.client import Server, Work, run_here
from zlm.loadtest.figures import figures
from zlm.loadtest.plan import Lengths, Pace, Shape
from zlm.loadtest.prompts import Source


@dataclass(frozen=True)
class Load:
    """What to send and where."""

    host: str
    port: int
    model: str
    input_tokens: int
    output_tokens: int
    vocab: int


def run_level(load: Load, concurrency: int, requests: int) -> dict[str, Any]:
    """Run *requests* in all from *concurrency* clients; return the figures."""
    source = Source(
        input=Lengths("fixed", load.input_tokens),
        output=Lengths("fixed", load.output_tokens),
        as_ids=True,
        vocab=load.vocab,
    )
    rng = random.Random(time.time_ns())  # new prompts, so that none is in a cache
    pace = Pace(concurrency=concurrency)
    work = Work(
        Server(load.host, load.port, keeps_alive=False),
        Shape(model=load.model),
        pace,
        source.conversations(requests, rng),
        pace.arrivals(requests, rng),
    )
    return figures(run_here(work), pace)
