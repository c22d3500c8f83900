"""``zlm run MODEL INPUT --output FILE``: answers a file of requests, line by line.

Starts a server for itself, or takes one that runs (``--url URL`` instead of MODEL), and asks it
what the input holds, many at once; each answer is a line of the output as soon as it is there.
Started again with the same files, after whatever ended it, it goes on where it was: nothing is
lost, nothing is done twice.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from zlm.cli import values
from zlm.cli.ask import address
from zlm.cli.failures import told
from zlm.cli.own_server import OwnServer
from zlm.cli.parse import parse, parse_known
from zlm.cli.run_client import Connection, Own, Running, Server, wait_ready
from zlm.cli.run_input import Entry, digests, entries
from zlm.cli.run_journal import Journal
from zlm.errors import ConfigError
from zlm.process.logs import escape
from zlm.progress import ProgressBar

SOME_FAILED = 3
CONCURRENCY = 256
EPILOG = """\
Input lines are OpenAI's batch format ({"custom_id": ..., "url": ..., "body": {...}}) or requests
themselves ({"id": ..., "prompt": ...} or {"messages": [...]}, with any field of the API). All flags
of zlm serve are taken too. Lines that the server refuses are answered with the error, and the exit
status is 3. What is done is not done again when flags change: give --anew, or another output file;
a request that has changed since it was answered (see "request" in its answer, a digest; in a batch
file it is in "id") is an error that says so.
"""


def main(words: Sequence[str]) -> int:
    """Run ``zlm run`` with its arguments *words*; return the exit status."""
    takes_model = not any(word == "--url" or word.startswith("--url=") for word in words)
    options, flags = parse_known(_parser(takes_model), words)

    def work() -> int:
        defaults = _defaults(options)
        if takes_model:
            parse([options.model, *flags])  # wrong flags are told at once
        elif flags:
            raise ConfigError(f"{flags[0]}: a server that runs takes no flags")
        return _run(options, flags, defaults)

    return told("run", work, interrupted="interrupted; the same command goes on from here")


def _parser(takes_model: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zlm run",
        usage="zlm run (MODEL INPUT [flags of zlm serve] | --url URL INPUT) --output FILE [...]",
        description="Answer a file of requests; a run that was ended goes on where it was.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    if takes_model:
        parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or an id")
    parser.add_argument("input", metavar="INPUT", type=Path, help="JSON lines, a request each")
    where = parser.add_argument_group("a server that runs")
    where.add_argument("--url", help="ask it instead of loading MODEL, as http://127.0.0.1:8000")
    key = os.environ.get("ZLM_API_KEY", "")
    where.add_argument("--api-key", default=key, metavar="KEY", help="its key ($ZLM_API_KEY)")
    files = parser.add_argument_group("answers")
    told = "JSON lines, an answer each"
    files.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=told)
    files.add_argument("--anew", action="store_true", help="forget what the output file holds")
    asked = parser.add_argument_group("requests")
    asked.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        default=CONCURRENCY,
        help=f"requests at once (default: {CONCURRENCY})",
    )
    asked.add_argument(
        "--max-tokens",
        type=values.max_tokens,
        metavar="N",
        help="of each answer, unless its line says (default: the API's)",
    )
    asked.add_argument(
        "--temperature",
        type=values.temperature,
        metavar="T",
        help="likewise (default: the model's)",
    )
    asked.add_argument(
        "--body",
        metavar="JSON",
        default="{}",
        help="fields of every request that lacks them (default: none)",
    )
    return parser


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of requests that do not set them."""
    if options.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    try:
        fields = msgspec.json.decode(options.body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--body must be a JSON object: {error}") from error
    for name in ("max_tokens", "temperature"):
        if getattr(options, name) is not None:
            fields[name] = getattr(options, name)
    return fields


def _run(options: argparse.Namespace, flags: Sequence[str], defaults: dict[str, Any]) -> int:
    if "-" in (str(options.input), str(options.output)):
        raise ConfigError("-: give files, so that a run that was ended can go on")
    _refuse_same(options.input, options.output)
    ids = digests(options.input)
    if not ids:
        print(f"zlm run: {options.input} holds no requests", file=sys.stderr)
    journal = Journal(options.output, anew=options.anew)
    try:
        journal.check(ids)
        num_done, left = len(journal.done), len(ids) - len(journal.done)
        if num_done:
            done = f"{num_done} of {len(ids)} are done: flags of this run do not change them"
            print(f"zlm run: {done}; --anew answers all again", file=sys.stderr)
        began = time.monotonic()
        if left:
            waiting = (e for e in entries(options.input, defaults) if e.id not in journal.done)
            with _server(options, flags) as server:
                asyncio.run(_answer_all(server, waiting, journal, left, options.concurrency))
        failed = f", {journal.num_failed} of them errors" if journal.num_failed else ""
        seconds = time.monotonic() - began
        print(
            f"zlm run: {len(journal.done)} answers{failed} in {options.output}, {seconds:.1f} s",
            file=sys.stderr,
        )
        if journal.first_failure:
            print(f"zlm run: the first error: {escape(journal.first_failure)}", file=sys.stderr)
    finally:
        journal.close()
    return SOME_FAILED if journal.num_failed else 0


def _refuse_same(given: Path, output: Path) -> None:
    """Raise ConfigError if the output is the input, under whatever name."""
    try:
        is_same = os.path.samefile(given, output)
    except OSError:  # one of them is not there (yet)
        return
    if is_same:
        raise ConfigError(f"--output {output} is the input: its requests would be lost")


@contextmanager
def _server(options: argparse.Namespace, flags: Sequence[str]) -> Iterator[Server]:
    if options.url is not None:
        yield Running(address(options.url), options.api_key)
        return
    with OwnServer(options.model, flags) as server:
        yield Own(server)


async def _answer_all(
    server: Server, waiting: Iterator[Entry], journal: Journal, left: int, concurrency: int
) -> None:
    """Answer what is *waiting*, *concurrency* at once."""
    await wait_ready(server)
    with ProgressBar(left, True) as bar:

        async def work() -> None:
            connection = Connection(server)
            try:
                for entry in waiting:
                    await _answer(entry, connection, journal, bar)
            finally:
                connection.close()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, left)):
                    group.create_task(work())
        except ExceptionGroup as group_of_all:
            raise group_of_all.exceptions[0] from None


async def _answer(entry: Entry, connection: Connection, journal: Journal, bar: ProgressBar) -> None:
    if entry.problem:
        journal.write(entry, 0, entry.problem, "")
        bar.advance(1, 0)
        return
    status, body, request_id = await connection.ask(entry.path, entry.body)
    journal.write(entry, status, body, request_id)
    usage = body.get("usage") or {} if isinstance(body, dict) else {}
    bar.advance(1, usage.get("completion_tokens") or 0)
