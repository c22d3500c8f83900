"""What a start costs and what an idle server uses: ``zlm bench startup``, for shapes too.

    python bench/startup.py MODEL_OR_SHAPE [--cold] [--runs 1] [--idle-seconds 10] [-- SERVE FLAGS]

What is measured stands in ``zlm/cli/bench_startup.py``.
"""

import sys

from tree import model_and_flags, split_flags

from zlm.cli.bench import main as bench


def main() -> int:
    words, flags = split_flags(sys.argv[1:])
    places = [at for at, word in enumerate(words) if not word.startswith("-")]
    valued = {at + 1 for at, word in enumerate(words) if word in ("--runs", "--idle-seconds")}
    for at in places:
        if at not in valued:
            words[at], flags = model_and_flags(words[at], flags)
            break
    return bench(["startup", *words, "--", *flags])


if __name__ == "__main__":
    sys.exit(main())
