"""``zlm doctor``: what of this machine zlm needs, whether it is there, and what to do if not."""

import argparse
from collections.abc import Callable, Iterable, Sequence

from zlm.cli import doctor_checks as checks
from zlm.cli.doctor_checks import Finding, State
from zlm.process.logs import escape

NAME_WIDTH = 14


def main(words: Sequence[str]) -> int:
    """Run ``zlm doctor`` with its arguments *words*; return 1 if something is bad, else 0."""
    parser = argparse.ArgumentParser(
        prog="zlm doctor",
        description="Look at this machine: driver, GPU, packages, memory, folders, port and hub.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    options = parser.parse_args(list(words))
    sections: list[Callable[[], Iterable[Finding]]] = [
        checks.python,
        checks.packages,
        checks.gpu,
        checks.machine,
        checks.folders,
        lambda: checks.port(options.host, options.port),
        checks.hub,
    ]
    return show(finding for section in sections for finding in section())


def show(findings: Iterable[Finding]) -> int:
    """Print each of *findings* as it comes; return the exit status."""
    num_bad = 0
    for finding in findings:
        line = f"{finding.state.value:5}{finding.what:<{NAME_WIDTH}}{escape(finding.text)}"
        print(line, flush=True)
        if finding.advice:
            print(f"{'':5}{'':{NAME_WIDTH}}→ {finding.advice}", flush=True)
        num_bad += finding.state is State.BAD
    print(f"\n{num_bad} to be put right" if num_bad else "\nnothing to be put right")
    return 1 if num_bad else 0
