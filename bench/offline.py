"""Throughput of the offline ``LLM``, case by case: ``zlm bench offline``, for shapes too.

    python bench/offline.py SHAPE_OR_MODEL [--cases b1,b8,b64,b256,prefill] [--reps 3] [--eager]
                            [--device auto] [--dtype bfloat16] [--set NAME=VALUE ...]

SHAPE is a folder of ``bench/shapes``: a config.json, whose weights are drawn at random. A model (a
folder, a GGUF file, an id) brings its own. What is measured stands in ``zlm/loadtest/offline.py``.

Prints one JSON document a line: first the seconds until the engine was ready, then each case with
the seconds of every repetition; rates are of the median. ``--set`` gives any keyword of ``LLM``,
its value in JSON or plain text: --set kv_cache_memory_bytes=1000000000.
"""

import sys

from tree import SHAPES

from zlm.cli.bench import main as bench

DEFAULTS = {
    "--cases": "b1,b8,b64,b256,prefill",
    "--dtype": "bfloat16",
    "--max-model-len": "8192",
    "--max-num-seqs": "256",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    model, *words = sys.argv[1:]
    given = [word for pair in DEFAULTS.items() for word in pair]
    given += ["--set", "gpu_memory_utilization=0.85", "--label", f"shape={model}"]
    if (SHAPES / model).is_dir():
        given += ["--load-format", "dummy"]
        model = str(SHAPES / model)
    return bench(["offline", model, *given, *words])


if __name__ == "__main__":
    sys.exit(main())
