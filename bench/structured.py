"""Structured output measured: what answers are worth, what masks cost, what others feel of it.

    python bench/structured.py MODEL [--schemas 200] [--parts mask,answers,beside] [--rounds 3]
                               [--streams 4] [--requests 1] [-- SERVE FLAGS]

Serves MODEL, asks it for answers of 200 varied schemas at temperature 1 and validates every
finished one with ``jsonschema``; walks the same grammars in this process, timing each token's mask;
and compares the gaps of ``--streams`` plain streams beside as many plain and beside as many
structured ones, in turns. Both are driven by the client of ``zlm bench serve``: the measured ones,
of ``--requests`` answers each a round, from this process, which does nothing else meanwhile, their
neighbours from another, from before they start until after they end. ``--parts beside`` alone takes
some minutes on 2 cores and needs a machine that does nothing else; a GPU wants more ``--requests``
and ``-- --dtype bfloat16``, for the server starts in float32. Prints a table, and as its last line
one JSON document.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from tree import split_flags

from zlm.engine.grammar import GrammarCompiler, GrammarState
from zlm.loadtest.client import Server as Address, Work, run_here
from zlm.loadtest.figures import series
from zlm.loadtest.plan import Pace, Shape, Turn
from zlm.messages import Grammar
from zlm.models.config import load_spec
from zlm.tokenizer.grammar_checks import token_bytes
from zlm.tokenizer.load import load_vocabulary
from zlm.tokenizer.token_table import TokenTable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from json_schemas import Schema, schemas
from running_server import MODEL, START_SECONDS, Server, eventually_true

MAX_TOKENS = 120
CLIENTS = 8  # answers asked for at once
TURN = Turn("Once upon a time", 4, 400)  # long answers: few steps have a prefill in them
MANY = 10_000  # requests of neighbours, which are ended long before
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
NEIGHBOURS: dict[str, dict[str, Any]] = {  # none of which ends within the tokens asked for
    "plain": {},
    "schema": {"structured_outputs": {"json": {"type": "array", "items": ITEM, "minItems": 200}}},
    "regex": {"structured_outputs": {"regex": "([a-z]+ ){400}"}},  # 0.3 ms a mask
}


def ask(server: Server, schema: Schema, seed: int) -> tuple[str, str]:
    """Return the finish reason and the text of one answer at temperature 1."""
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    fields = {"temperature": 1, "seed": seed, "max_tokens": MAX_TOKENS}
    answer = server.chat("Fill it in.", response_format=form, **fields)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["finish_reason"], answer.text


def worth(server: Server, asked: list[Schema]) -> dict[str, Any]:
    """Validate the answers to all schemas."""
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda n: ask(server, asked[n], n), range(len(asked))))
    seconds = time.perf_counter() - began
    finished = valid = 0
    for schema, (reason, text) in zip(asked, answers, strict=True):
        if reason == "stop":
            finished += 1
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                valid += 1
            except ValueError as error:
                print(f"not valid: {text!r} for {schema}: {error}")
            except jsonschema.ValidationError as error:
                print(f"not valid: {text!r} for {schema}: {error.message}")
    return {"schemas": len(asked), "finished": finished, "valid": valid, "seconds": seconds}


def mask_cost(model: str, asked: list[Schema]) -> dict[str, float]:
    """Time compiling, and each token with the mask after it, on walks of random allowed tokens."""
    spec, vocabulary = load_spec(model), load_vocabulary(model)
    tokens = token_bytes(vocabulary, TokenTable(vocabulary), spec.eos_token_ids)
    compiler = GrammarCompiler(tokens, spec.vocab_size)
    draw = random.Random(0)
    compiles, costs = [], []
    for schema in asked:
        began = time.perf_counter()
        matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))
        compiles.append(time.perf_counter() - began)
        for _ in range(MAX_TOKENS):
            bits = np.unpackbits(matcher.words.view(np.uint8), bitorder="little")
            token = draw.choice(np.flatnonzero(bits).tolist())
            began = time.perf_counter()
            matcher.advance(token)
            costs.append(time.perf_counter() - began)
            if matcher.state is not GrammarState.OPEN:
                break
    return {
        "compile_ms_mean": 1e3 * statistics.mean(compiles),
        "compile_ms_max": 1e3 * max(compiles),
        "mask_us_median": 1e6 * statistics.median(costs),
        "mask_us_p99": 1e6 * float(np.quantile(costs, 0.99)),
        "mask_us_max": 1e6 * max(costs),
        "tokens": len(costs),
    }


def load(server: Server, streams: int, requests: int, fields: dict[str, Any]) -> Work:
    """Return *requests* in all with *fields*, of *streams* clients."""
    shape = Shape(model=MODEL, fields={"temperature": 1, **fields})
    pace = Pace(concurrency=streams)
    return Work(Address("127.0.0.1", server.port), shape, pace, [(TURN,)] * requests, [])


def beside(
    server: Server, fields: dict[str, Any], streams: int, requests: int
) -> tuple[list[float], dict[str, float]]:
    """Measure plain streams beside as many neighbours with *fields*, for one round.

    Returns the plain streams' gaps in ms, and other figures of the round.
    """
    work = load(server, streams, streams * requests, {})
    neighbours = multiprocessing.get_context("spawn").Process(
        target=run_here, args=(load(server, streams, MANY, fields),), daemon=True
    )

    def are_running(number: int) -> bool:
        return server.metric("vllm:num_requests_running") == number

    neighbours.start()
    try:
        assert eventually_true(lambda: are_running(streams), START_SECONDS), "no neighbours"
        before, start = server.metric("vllm:generation_tokens"), time.perf_counter()
        seen = run_here(work)
        seconds = time.perf_counter() - start
        others = server.metric("vllm:generation_tokens") - before
        assert neighbours.is_alive(), "the neighbours ended early"
    finally:
        neighbours.kill()
        neighbours.join()
    assert eventually_true(lambda: are_running(0), START_SECONDS), "abandoned requests go on"
    assert not (errors := [each.detail for each in seen.records if each.error]), errors[0]
    own = sum(each.output_tokens for each in seen.records)
    return [1e3 * gap for gap in series(seen.records)["gap"]], {
        "tokens_a_read": own / sum(len(each.times) for each in seen.records),
        "neighbours_tok_s": (others - own) / seconds,
        "client_cpu": seen.cpu_seconds / seconds,
    }


def compared(server: Server, rounds: int, streams: int, requests: int) -> dict[str, dict[str, Any]]:
    """Measure plain streams beside each kind of neighbours, in turns; return figures by kind."""
    found: dict[str, list[tuple[list[float], dict[str, float]]]] = {name: [] for name in NEIGHBOURS}
    for _ in range(1 + rounds):
        for name, fields in NEIGHBOURS.items():
            found[name].append(beside(server, fields, streams, requests))
            print(f"beside {name}: {statistics.median(found[name][-1][0]):.3f} ms", flush=True)
    report = {}
    for name, (_, *measured) in found.items():  # grammars were compiled in the first round
        gaps, others = zip(*measured, strict=True)
        median, p95, p99 = np.quantile(np.concatenate(gaps), (0.5, 0.95, 0.99)).tolist()
        report[f"beside_{name}"] = {
            "median_ms": median,
            "p95_ms": p95,
            "p99_ms": p99,
            "medians_ms": [round(statistics.median(each), 3) for each in gaps],
            **{what: statistics.mean(each[what] for each in others) for what in others[0]},
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--parts", default="mask,answers,beside")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4, help="plain ones, and as many neighbours")
    parser.add_argument("--requests", type=int, default=1, help="of each stream a round")
    words, flags = split_flags(sys.argv[1:])
    arguments = parser.parse_args(words)
    parts = arguments.parts.split(",")
    asked = schemas(arguments.schemas)
    report: dict[str, Any] = {}
    if "mask" in parts:
        report["mask"] = mask_cost(arguments.model, asked)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--served-model-name", MODEL, "--max-model-len", "1024", *flags]
        with Server(Path(arguments.model), Path(folder) / "log", flags) as server:
            if "answers" in parts:
                report["answers"] = worth(server, asked)
            if "beside" in parts:
                options = (arguments.rounds, arguments.streams, arguments.requests)
                report |= compared(server, *options)
    for name, figures in report.items():
        rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
        print(name, rounded)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
