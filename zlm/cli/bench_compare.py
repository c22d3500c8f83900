"""``zlm bench compare A B``: two servers in turn under the same load, and ratios.

Both get the same prompts at the same paces; a server that is started is up only in its turn. With
--rounds they take turns again, each time with new prompts, and ratios are of the medians.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from zlm.cli.bench_load import add_flags, seed_of
from zlm.cli.bench_serve import (
    check,
    kept,
    measure,
    parser_of,
    running,
    split,
    vocab_of,
    write,
)
from zlm.cli.failures import told
from zlm.errors import ConfigError
from zlm.loadtest import table
from zlm.loadtest.session import Level

NAMES = ("A", "B")


def main(words: Sequence[str], name: str = "compare") -> int:
    """Run ``zlm bench compare`` with its arguments *words*; return the exit status."""
    parser = parser_of(name, "A B", "Measure two servers in turn under the same load.")
    parser.add_argument("targets", metavar="TARGET", nargs=2, help='also "MODEL FLAGS"')
    parser.add_argument("--rounds", type=int, default=1, help="turns of each (default: 1)")
    add_flags(parser)
    options, flags = split(parser, words)
    return told(f"bench {name}", lambda: _run(options, flags))


def _run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    if options.rounds < 1:
        raise ConfigError("--rounds must be at least 1")
    check(options, options.targets, flags)
    options.vocab = options.vocab or min(map(vocab_of, options.targets))
    seed = seed_of(options)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    document: dict[str, Any] = {"bench": "compare", "seed": seed, "rounds": options.rounds}
    document |= rounds
    last: dict[str, list[Level]] = {}
    for turn in range(options.rounds):
        for name, target in zip(NAMES, options.targets, strict=True):
            result: dict[str, Any] = {"target": target, "seed": f"{seed}/{turn}"}
            rounds[name].append(result)
            if not options.json:
                print(f"\n{name}: {target}", flush=True)
            with (
                kept(document, [*rounds["A"], *rounds["B"]]),
                running(target, flags, result, options.server_log) as url,
            ):
                last[name] = measure(url, options, result)
    first, second = (medians([each["levels"] for each in rounds[name]]) for name in NAMES)
    if not options.json:
        print("\n" + "\n".join(table.ratios(first, second)))
    named = [(f"{n}: {t}", last[n]) for n, t in zip(NAMES, options.targets, strict=True)]
    document["ratios"] = [ratio(a, b) for a, b in zip(first, second, strict=True)]
    print(json.dumps(document), flush=True)
    write(options, named)
    return 0 if all(level["ok"] for level in (*first, *second)) else 1


def medians(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the levels of several rounds as one: the median of every number."""
    merged = []
    for same in zip(*rounds, strict=True):
        level = dict(same[-1])
        for key, value in level.items():
            numbers = [each[key] for each in same if isinstance(each.get(key), int | float)]
            if isinstance(value, float) and len(numbers) == len(same):
                level[key] = statistics.median(numbers)
        merged.append(level)
    return merged


def ratio(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return B / A of the figures that tell speed, with the load that they are of."""
    found: dict[str, Any] = {"conc": first["conc"], "rate": first["rate"]}
    for _, key in table.RATIOS:
        a, b = first.get(key), second.get(key)
        if a and b is not None:
            found[key] = round(b / a, 4)
    return found
