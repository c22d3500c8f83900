"""Serving speed: ``zlm bench serve``, in a closed loop, for the shapes of this folder too.

    python bench/serve.py MODEL_OR_URL [--concurrency 1,8,32] [--requests 4] [--input-tokens 128]
                          [--output-tokens 128] [--vocab 40000] [--client-processes 1]
                          [--json] [-- SERVE FLAGS]

A model starts ``zlm serve``, and a name of ``bench/shapes`` one on random weights without a
tokenizer; a URL takes what runs there. Each of C clients sends a request of random token ids, over
a connection of its own, reads its stream to the end and sends the next, ``--requests`` times on
average. All other flags of ``zlm bench serve`` are taken too; its --help says what is measured.
"""

import sys

from tree import model_and_flags, split_flags

from zlm.cli.bench import main as bench

RENAMED = {"--requests": "--requests-each"}
DEFAULTS = "--model bench --vocab 40000 --prompts ids --no-keep-alive --server-log -"


def main() -> int:
    words, flags = split_flags(sys.argv[1:])
    if not words or words[0].startswith("-"):
        print(__doc__)
        return 2
    target, *words = words
    words = [RENAMED.get(word, word) for word in words]
    if "://" not in target:
        target, flags = model_and_flags(target, ["--served-model-name", "bench", *flags])
    return bench(["serve", target, *DEFAULTS.split(), *words, *(["--", *flags] if flags else [])])


if __name__ == "__main__":
    sys.exit(main())
