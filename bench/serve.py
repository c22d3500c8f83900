"""Serving speed: a closed-loop load of streamed completions against a server.

    python bench/serve.py MODEL_OR_URL [--concurrency 1,8,32] [--requests 4] [--input-tokens 128]
                          [--output-tokens 128] [--vocab 40000] [--client-processes 1]
                          [--json] [-- SERVE FLAGS]

A model starts ``zlm serve``, and a name of ``bench/shapes`` one on random weights without a
tokenizer; a URL takes what runs there (any OpenAI-compatible server). Each of C clients sends a
request, reads its stream to the end and sends the next, ``--requests`` times on average. Before
each level as many short requests as it has clients warm the server up. What is sent and measured is
told in ``bench/client.py``.

Prints a table, or with --json a JSON document a level; for a server of its own, the seconds it took
to be ready and to leave; and as the last line one JSON document of it all.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from client import Load, run_level
from tree import Server, split_flags

WARM_UP_TOKENS = (128, 32)  # input and output


def show(level: dict[str, Any]) -> None:
    print(
        f"{level['conc']:>5} {level['ok']:>5} {level['errors']:>4} "
        f"{level['out_tok_s']:>10} {level['in_tok_s']:>9} "
        f"{level['ttft_p50_ms']!s:>10} {level['ttft_p99_ms']!s:>10} "
        f"{level['gap_p50_ms']!s:>9} {level['gap_p99_ms']!s:>9} {level['client_cpu']:>7}",
        flush=True,
    )


def run(load: Load, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Warm up and measure every level, printing a line for each."""
    inputs, outputs = WARM_UP_TOKENS
    short = replace(
        load,
        input_tokens=min(load.input_tokens, inputs),
        output_tokens=min(load.output_tokens, outputs),
    )
    if not options.json:
        print(
            "    C  reqs errs  out tok/s  in tok/s  ttft p50   ttft p99   gap p50   gap p99 "
            "client CPU   (ms)"
        )
    levels = []
    for concurrency in map(int, options.concurrency.split(",")):
        processes = options.client_processes
        warm_up = run_level(short, concurrency, concurrency, processes)
        if not warm_up["ok"]:
            raise SystemExit(f"the warm-up requests failed: {warm_up['err']}")
        requests = max(concurrency, round(concurrency * options.requests))
        levels.append(run_level(load, concurrency, requests, processes))
        print(json.dumps(levels[-1]), flush=True) if options.json else show(levels[-1])
    return levels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="a model for zlm serve, a shape, or http://HOST:PORT")
    parser.add_argument("--model", default="bench", help="model name to ask for (with a URL)")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=float, default=4, help="requests of each client")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=40000, help="prompt ids are 100..vocab-1")
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="a JSON document a level, no table")
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    server = None
    if "://" not in options.target:
        server = Server(options.target, ["--served-model-name", "bench", *flags])
    where = urlsplit(server.url if server else options.target)
    load = Load(
        where.hostname or "127.0.0.1",
        where.port or 80,
        options.model,
        options.input_tokens,
        options.output_tokens,
        options.vocab,
    )
    result: dict[str, Any] = {"bench": "serve", "target": options.target}
    try:
        result["levels"] = run(load, options)
    finally:
        if server is not None:
            result["ready_s"] = round(server.ready_seconds, 2)
            result["stop_s"] = round(server.stop(), 2)
    if server is not None:
        print(f"ready after {result['ready_s']} s, left in {result['stop_s']} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
