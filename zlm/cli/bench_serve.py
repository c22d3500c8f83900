"""``zlm bench serve TARGET``: a server under load.

TARGET is the URL of any OpenAI-compatible server, a model to serve meanwhile, or a command that
starts a server. Prints a line a level and one JSON document last; --report writes a page.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from zlm.cli.bench_load import add_flags, model_at, plan_of, seed_of, server_at
from zlm.cli.failures import told
from zlm.cli.parse import parse, parse_known
from zlm.errors import ConfigError, ZlmError
from zlm.loadtest import table
from zlm.loadtest.prompts import COMMON_VOCAB
from zlm.loadtest.report import write_records, write_report
from zlm.loadtest.servers import PORT, ServerProcess, serve_command
from zlm.loadtest.session import Level, levels, prepared, samples
from zlm.process.runtime import temporary
from zlm.weights.resolve import resolve_model

TARGETS = """\
TARGET is the URL of a server that runs, a model (zlm serves it meanwhile, with what flags of zlm
serve are given), or a quoted command with {port} in it: "vllm serve MODEL --port {port}".
In an open loop (--request-rate) all times count from when a request was to be sent; in a closed one
from when it was. Tokens are counted by the server's usage, or else by events.
"""


def main(words: Sequence[str], name: str = "serve") -> int:
    """Run ``zlm bench serve`` with its arguments *words*; return the exit status."""
    parser = parser_of(name, "TARGET", "Measure a server under load.")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="what is measured: see below")
    parser.add_argument("--url", "--base-url", help="another way to give a server that runs")
    add_flags(parser)
    options, flags = split(parser, words)
    return told(f"bench {name}", lambda: _run(options, flags))


def parser_of(name: str, targets: str, what: str) -> argparse.ArgumentParser:
    """Return a parser without flags yet."""
    return argparse.ArgumentParser(
        prog=f"zlm bench {name}",
        usage=f"zlm bench {name} {targets} [options] [-- flags of zlm serve]",
        description=what,
        epilog=TARGETS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def split(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return what *words* say to *parser*, and the rest, which are the server's flags."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    is_command = any(PORT in word for word in words)  # whose flags are its own business
    known = parser.parse_known_args if is_command else partial(parse_known, parser)
    options, flags = known(words[:at])
    return options, flags + words[at + 1 :]


def _run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    target = options.url or options.target
    if target is None or (options.url and options.target):
        raise ConfigError("give a TARGET: a URL, a model or a command; one of them")
    check(options, [target], flags)
    options.vocab = options.vocab or vocab_of(target)
    result: dict[str, Any] = {"bench": "serve", "target": target, "seed": seed_of(options)}
    with kept(result, [result]), running(target, flags, result, options.server_log) as url:
        found = measure(url, options, result)
    if "ready_s" in result and not options.json:
        print(f"ready after {result['ready_s']} s, left in {result['stop_s']} s")
    print(json.dumps(result), flush=True)
    write(options, [(target, found)])
    return 0 if any(level.figures["ok"] for level in found) else 1


def check(options: argparse.Namespace, targets: Sequence[str], flags: Sequence[str]) -> None:
    """Raise ConfigError for all that can be known to be wrong before anything is measured."""
    plan = plan_of(options)
    for target in targets:
        if "://" in target:
            server_at(target, options)
        else:
            _command(target, flags)
    are_running = all("://" in target for target in targets)
    if not are_running:
        samples(plan)  # before a server is started, which takes a while
    if flags and are_running:
        raise ConfigError(f"{flags[0]}: a server that runs takes no flags")
    for name in ("report", "records"):
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"--{name} {path}: must be a file in a folder that exists")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--{name} {path}: cannot be written")


@contextmanager
def kept(document: dict[str, Any], results: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Print *document* though the measurement breaks off, if any of *results* has a level."""
    try:
        yield
    except (ZlmError, KeyboardInterrupt) as error:
        if any(result.get("levels") for result in results):
            document["broken_off"] = str(error) or "interrupted"
            print(json.dumps(document), flush=True)
        raise


@contextmanager
def running(
    target: str, flags: Sequence[str], result: dict[str, Any], log: str | None
) -> Iterator[str]:
    """Give the URL of *target*, started if it has to be; *result* learns how long that took.

    log: a file for what it logs; ``-`` is stderr, None shows its end alone, if it does not start.
    """
    if "://" in target:
        yield target
        return
    command = _command(target, flags)
    with temporary("zlm-bench-") as folder:
        path = None if log == "-" else Path(log or folder / "log")
        server = ServerProcess(command, log=path)
        result["ready_s"] = round(server.ready_seconds, 2)
        try:
            yield server.url
        finally:
            result["stop_s"] = round(server.stop(), 2)


def _command(target: str, flags: Sequence[str]) -> list[str]:
    """Return the command that starts *target*; flags of zlm serve that are wrong are told here."""
    first, *rest = _words(target)
    words = [first, *rest, *flags]
    if PORT in target:
        if shutil.which(first) is None:
            raise ConfigError(f"{first}: there is no such command")
        return words
    is_program = shutil.which(first) is not None and not os.path.exists(first)
    if is_program or (rest and not rest[0].startswith("-")):
        raise ConfigError(f"TARGET {target!r}: a command needs {PORT} where its port goes")
    parse(words)
    return serve_command(words[0], words[1:])


def _words(target: str) -> list[str]:
    if os.path.exists(target):  # Path's own raises for a command that is too long for a name
        return [target]
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise ConfigError(f"TARGET {target!r}: {error}") from error
    if not words:
        raise ConfigError("a TARGET is empty: give a URL, a model or a command")
    return words


def vocab_of(target: str) -> int:
    """Return below what random token ids are: all of a model's, or what most models have."""
    if "://" in target or PORT in target:
        return COMMON_VOCAB
    from zlm.models.config import load_spec  # takes a while to import

    return load_spec(resolve_model(_words(target)[0])).vocab_size


def measure(url: str, options: argparse.Namespace, result: dict[str, Any]) -> list[Level]:
    """Measure all levels of the server at *url*, telling of each; *result* gets their figures."""
    server = server_at(url, options)
    plan = prepared(server, plan_of(options, model_at(url, options)))
    result["model"], result["levels"] = plan.shape.model, []
    if not options.json:
        print(f"{table.heading()}   (ms)", flush=True)
    found = []
    tell = _show_progress if sys.stderr.isatty() else None
    for level in levels(server, plan, result["seed"], tell):
        if tell is not None:
            print("\r\x1b[K", end="", file=sys.stderr)
        found.append(level)
        result["levels"].append(level.figures)
        if options.json:
            print(json.dumps(level.figures), flush=True)
            continue
        print(table.row(level.figures), flush=True)
        for line in table.remarks(level.figures):
            print(f"{'':13}{line}", flush=True)
    return found


def _show_progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} requests ", end="", file=sys.stderr, flush=True)


def write(options: argparse.Namespace, tests: list[tuple[str, list[Level]]]) -> None:
    """Write the report and the records that are asked for."""
    for path, writer in ((options.report, write_report), (options.records, write_records)):
        if path is None:
            continue
        try:
            writer(path, tests)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        print(f"written to {path}", file=sys.stderr)
