"""``zlm complete``: a prompt goes on, in the terminal; connected as ``zlm chat`` is.

zlm complete MODEL --prompt "Once upon a time"
echo "Once upon a time" | zlm complete --url http://127.0.0.1:8000
"""

import sys
from collections.abc import Sequence
from contextlib import closing

from zlm.cli.chat import body, connected, parser, write
from zlm.cli.failures import told
from zlm.cli.parse import parse_known


def main(words: Sequence[str]) -> int:
    """Run ``zlm complete`` with its arguments *words*; return the exit status."""
    options, flags = parse_known(parser("complete"), words)
    prompt = sys.stdin.read().rstrip("\n") if options.prompt is None else options.prompt

    def work() -> int:
        with connected(options, flags, sys.stderr.isatty()) as (asker, name):
            request = body(options, name) | {"prompt": prompt}
            with closing(asker.stream("/v1/completions", request)) as pieces:
                write(pieces, sys.stdout.isatty())
            return 0

    return told("complete", work)
