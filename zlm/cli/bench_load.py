"""The flags of a load, which ``zlm bench serve`` and ``compare`` share, and what they come to."""

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from zlm.cli import ask, values
from zlm.errors import ConfigError
from zlm.loadtest.client import Server
from zlm.loadtest.plan import CONSTANT, ONE, Lengths, Limits, Pace, Shape
from zlm.loadtest.prompts import COMMON_VOCAB, Source
from zlm.loadtest.session import Plan

DEFAULT_TOKENS = Lengths("fixed", 128)
LENGTHS = "N, uniform:LEAST:MOST or normal:MEAN:DEVIATION"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give *parser* the flags of a load."""
    _add_pace(parser.add_argument_group("how requests come"))
    _add_content(parser.add_argument_group("what they are"))
    _add_measuring(parser.add_argument_group("measuring"))


def _add_pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        "--max-concurrency",
        metavar="C,...",
        type=_many(values.integer),
        help="closed loop: clients that each send when their answer is read; several give a level "
        "each (default: 1,8,32). With --request-rate: most requests at once",
    )
    group.add_argument(
        "--request-rate",
        metavar="R,...",
        type=_many(_rate_value),
        help="open loop: requests a second, whatever the server does; inf: all at once",
    )
    group.add_argument(
        "--burstiness",
        metavar="B",
        type=_rate,
        default=1.0,
        help="of arrivals: 1 is Poisson, less is burstier, inf is evenly spaced (default: 1)",
    )
    group.add_argument(
        "--requests",
        "--num-prompts",
        metavar="N",
        type=_positive,
        help="conversations of a level, of one request unless --turns says (default: 4 for each "
        "client, or 30 seconds of arrivals)",
    )
    group.add_argument(
        "--requests-each",
        metavar="N",
        type=_number,
        default=4.0,
        help="of each client (default: 4)",
    )
    group.add_argument(
        "--duration", metavar="S", type=_number, default=30.0, help="of arrivals (default: 30)"
    )


def _add_content(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="(default: completions)",
    )
    group.add_argument(
        "--input-tokens",
        "--random-input-len",
        metavar="LENGTHS",
        type=_lengths,
        default=DEFAULT_TOKENS,
        help=f"of each prompt, random: {LENGTHS} (default: 128)",
    )
    group.add_argument(
        "--output-tokens",
        "--random-output-len",
        metavar="LENGTHS",
        type=_lengths,
        help="of each answer, likewise (default: 128, or what the file says)",
    )
    group.add_argument(
        "--dataset",
        "--dataset-path",
        metavar="FILE",
        type=Path,
        help='prompts of a ShareGPT file, or of JSON lines {"prompt": ...} or {"messages": ...}',
    )
    group.add_argument(
        "--prompts",
        choices=("ids", "text"),
        help="what random prompts are (default: ids, of exact lengths; text in a chat)",
    )
    group.add_argument(
        "--vocab",
        metavar="N",
        type=_positive,
        help="ids are below it (default: the model's or 30000)",
    )
    group.add_argument(
        "--shared-prefix-tokens",
        metavar="N",
        type=_count,
        default=0,
        help="put before the input, the same for many requests (default: 0)",
    )
    group.add_argument(
        "--num-prefixes", metavar="N", type=_positive, default=1, help="different ones (default: 1)"
    )
    group.add_argument(
        "--turns",
        metavar="LENGTHS",
        type=_lengths,
        default=ONE,
        help="requests of a conversation, each after all that was said before (default: 1)",
    )
    group.add_argument(
        "--think-seconds", metavar="S", type=_number, default=0.0, help="between them (default: 0)"
    )
    group.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let answers end early (default: as long as asked for; shorter ones are errors)",
    )
    group.add_argument(
        "--no-stream", dest="stream", action="store_false", help="ask for whole answers"
    )
    group.add_argument("--body", metavar="JSON", default="{}", help="more fields of every request")


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", dest="name", help="ask for this model (default: the first)")
    group.add_argument(
        "--api-key", default=os.environ.get("ZLM_API_KEY", ""), help="(default: $ZLM_API_KEY)"
    )
    group.add_argument(
        "--goodput",
        metavar="METRIC:MS",
        nargs="+",
        default=[],
        help="objective of a request: ttft, tpot and e2e in ms, as ttft:200 tpot:20",
    )
    group.add_argument(
        "--warm-up",
        metavar="N",
        type=_count,
        help="short requests before each level (default: one for each client, at most 64)",
    )
    group.add_argument(
        "--seed",
        help="makes the prompts (default: another in each run, so that no cache has met them)",
    )
    group.add_argument(
        "--timeout", metavar="S", type=_number, default=600.0, help="of a request (default: 600)"
    )
    group.add_argument(
        "--no-keep-alive",
        dest="keep_alive",
        action="store_false",
        help="a connection for each request, made within its time",
    )
    group.add_argument(
        "--server-log", metavar="FILE", help="of a server that is started; - is stderr"
    )
    group.add_argument(
        "--client-processes", metavar="N", type=_positive, default=1, help="(default: 1)"
    )
    group.add_argument("--json", action="store_true", help="a JSON document a level, no table")
    group.add_argument("--report", metavar="FILE.html", type=Path, help="a page with plots")
    group.add_argument(
        "--records", metavar="FILE.jsonl", type=Path, help="every request's times, a line each"
    )


def server_at(url: str, options: argparse.Namespace) -> Server:
    """Return the server that *url* names, asked as *options* say. Raises ConfigError."""
    where = ask.address(url, flag="")
    return Server(
        where.host,
        where.port,
        where.prefix,
        where.is_tls,
        api_key=options.api_key,
        keeps_alive=options.keep_alive,
        timeout_seconds=options.timeout,
    )


def model_at(url: str, options: argparse.Namespace) -> str:
    """Return the model's name to ask for; raises ZlmError if the server does not tell."""
    if options.name:
        return str(options.name)
    names = ask.by_url(url, options.api_key, options.timeout).models()
    if not names:
        raise ConfigError("the server lists no model: give its name with --model")
    return names[0]


def plan_of(options: argparse.Namespace, model: str = "") -> Plan:
    """Return what *options* ask for, of *model*; raises ConfigError."""
    as_ids = options.prompts == "ids" or (options.prompts is None and not options.dataset)
    if options.endpoint == "chat" or options.turns != ONE:
        if options.prompts == "ids":
            raise ConfigError("--prompts ids: a chat and a conversation of several turns need text")
        as_ids = False
    try:
        fields = msgspec.json.decode(options.body, type=dict)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--body must be a JSON object: {error}") from error
    output = options.output_tokens or (None if options.dataset else DEFAULT_TOKENS)
    source = Source(
        input=options.input_tokens,
        output=output,
        turns=options.turns,
        as_ids=as_ids,
        vocab=options.vocab or COMMON_VOCAB,
        prefix_tokens=options.shared_prefix_tokens,
        num_prefixes=options.num_prefixes,
    )
    shape = Shape(
        model=model,
        endpoint=options.endpoint,
        ignore_eos=options.ignore_eos,
        is_streamed=options.stream,
        fields=fields,
    )
    return Plan(
        shape=shape,
        source=source,
        paces=_paces(options),
        requests=options.requests,
        requests_each=options.requests_each,
        seconds=options.duration,
        warm_up=options.warm_up,
        think_seconds=options.think_seconds,
        limits=Limits.parse(options.goodput) if options.goodput else None,
        processes=options.client_processes,
        dataset=options.dataset,
    )


def seed_of(options: argparse.Namespace) -> str:
    """Return the seed of the prompts, a new one unless it is given."""
    return options.seed or str(time.time_ns())


def _paces(options: argparse.Namespace) -> tuple[Pace, ...]:
    rates, clients = options.request_rate, options.concurrency
    if any(each < 1 for each in clients or ()):
        raise ConfigError("--concurrency must be at least 1")
    if rates is None:
        return tuple(Pace(concurrency=each) for each in clients or (1, 8, 32))
    if clients and len(clients) > 1:
        raise ConfigError("--concurrency must be one number beside --request-rate: a cap")
    cap = clients[0] if clients else 0
    if math.inf in rates and options.requests is None and not cap:
        raise ConfigError("--request-rate inf needs --requests, or --concurrency")
    return tuple(Pace(rate, cap, options.burstiness) for rate in rates)


def _many(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return values.typed(lambda text: [parse(word) for word in text.replace(",", " ").split()])


def _rate_value(text: str) -> float:
    number = CONSTANT if text == "inf" else values.number(text)
    if number <= 0:
        raise ValueError("must be above 0")
    return number


_rate, _lengths = values.typed(_rate_value), values.typed(Lengths.parse)
_count, _positive = values.ranged(values.integer, 0), values.ranged(values.integer, 1)
_number = values.ranged(values.number, 0)
