"""Structured output measured: what answers are worth, what masks cost, what others feel of it.

    python bench/structured.py MODEL [--schemas 200] [--parts mask,answers,beside] [--rounds 3]

Serves MODEL, asks it for answers of 200 varied schemas at temperature 1 and validates every
finished one with ``jsonschema``; walks the same grammars in this process, timing each token's mask;
and compares the inter-token time of plain streams beside plain and beside structured ones, in
turns. ``--parts beside`` alone takes a minute; it needs a machine that does nothing else. Prints a
table, and as its last line one JSON document.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from zlm.engine.grammar import GrammarCompiler, GrammarState
from zlm.messages import Grammar
from zlm.models.config import load_spec
from zlm.tokenizer.grammar_checks import token_bytes
from zlm.tokenizer.load import load_vocabulary
from zlm.tokenizer.token_table import TokenTable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from json_schemas import Schema, schemas
from running_server import Server

MAX_TOKENS = 120
CLIENTS = 8  # answers asked for at once
STREAMS = 4
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
NEIGHBOURS: dict[str, dict[str, Any]] = {  # none of which ends within the tokens asked for
    "plain": {"ignore_eos": True},
    "schema": {"structured_outputs": {"json": {"type": "array", "items": ITEM, "minItems": 200}}},
    "regex": {"structured_outputs": {"regex": "([a-z]+ ){100}"}},  # 0.3 ms a mask
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


def gaps(server: Server, fields: dict[str, Any]) -> list[float]:
    """Return the seconds between the chunks of one stream."""
    with server.open_stream("Once upon a time", max_tokens=100, **fields) as raw:
        times, data = [], b""
        while chunk := raw.recv(65536):
            data += chunk
            times += [time.perf_counter()] * chunk.count(b"data: ")
    return [after - before for before, after in pairwise(times[3:-1])]


def beside(server: Server, neighbours: dict[str, Any]) -> list[float]:
    """Return the inter-token times of plain streams beside as many streams like *neighbours*."""
    found: list[float] = []
    plain = {"ignore_eos": True}

    def run(fields: dict[str, Any], into: list[float] | None) -> None:
        got = gaps(server, {**fields, "temperature": 1})
        if into is not None:
            into += got

    threads = [threading.Thread(target=run, args=(plain, found)) for _ in range(STREAMS)]
    threads += [threading.Thread(target=run, args=(neighbours, None)) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def compared(server: Server, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure beside plain streams, and beside each kind of structured ones, in turns."""
    for neighbours in NEIGHBOURS.values():
        beside(server, neighbours)  # compiles it
    found: dict[str, list[list[float]]] = {name: [] for name in NEIGHBOURS}
    for _ in range(rounds):
        for name, neighbours in NEIGHBOURS.items():
            found[name].append(beside(server, neighbours))
    return {
        f"beside_{name}": {
            "median_ms": 1e3 * float(np.median(np.concatenate(times))),
            "p95_ms": 1e3 * float(np.quantile(np.concatenate(times), 0.95)),
            "medians_ms": [round(1e3 * statistics.median(each), 2) for each in times],
        }
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--parts", default="mask,answers,beside")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    asked = schemas(arguments.schemas)
    report: dict[str, Any] = {}
    if "mask" in parts:
        report["mask"] = mask_cost(arguments.model, asked)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--served-model-name", "smol", "--max-model-len", "1024"]
        with Server(Path(arguments.model), Path(folder) / "log", flags) as server:
            if "answers" in parts:
                report["answers"] = worth(server, asked)
            if "beside" in parts:
                report |= compared(server, arguments.rounds)
    for name, figures in report.items():
        rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
        print(name, rounded)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
