"""Throughput of the offline ``LLM``, case by case.

    python bench/offline.py SHAPE_OR_MODEL [--cases b1,b8,b64,b256,prefill] [--reps 3] [--eager]
                            [--device auto] [--dtype bfloat16] [--set NAME=VALUE ...]

SHAPE is a folder of ``bench/shapes``: a config.json, whose weights are drawn at random. A model (a
folder, a GGUF file, an id) brings its own. Prompts are random token ids, all submitted at once and
the same in every run; greedy, EOS ignored, no prefix cache, no tokenizer. A case is a name of
``CASES`` or REQUESTS:INPUT:OUTPUT in tokens, and runs once to warm up and then ``--reps`` times.

Prints one JSON document a line: first the seconds until the engine was ready, then each case with
the seconds of every repetition; rates are of the median. ``--set`` gives any keyword of ``LLM``,
its value in JSON or plain text: --set kv_cache_memory_bytes=1000000000.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

from tree import SHAPES

from zlm import LLM, SamplingParams
from zlm.models.config import load_spec
from zlm.weights.resolve import resolve_model

CASES = {  # requests, prompt tokens, output tokens
    "b1": (1, 128, 256),
    "b8": (8, 512, 256),
    "b64": (64, 512, 256),
    "b256": (256, 512, 256),
    "prefill": (16, 4096, 1),
}


def case(text: str) -> tuple[int, int, int]:
    """Return (requests, prompt tokens, output tokens) of a case's name or numbers."""
    if text in CASES:
        return CASES[text]
    try:
        requests, prompt, output = map(int, text.split(":"))
    except ValueError:
        raise SystemExit(f"no case {text!r}: give REQUESTS:INPUT:OUTPUT or {list(CASES)}") from None
    return requests, prompt, output


def keyword(text: str) -> tuple[str, Any]:
    """Return name and value of ``NAME=VALUE``."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def measure(
    llm: LLM, rng: random.Random, vocab: int, sizes: tuple[int, int, int], reps: int
) -> dict[str, Any]:
    """Run one case ``reps`` times after a warm-up and return its figures."""
    requests, prompt, output = sizes
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    seconds = []
    steps = llm.stats().steps
    for rep in range(reps + 1):
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, vocab - 10) for _ in range(prompt)]}
            for _ in range(requests)
        ]
        began = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        for answer in answers:
            if answer.error is not None or len(answer.outputs[0].token_ids) != output:
                raise SystemExit(f"request {answer.request_id} failed: {answer}")
        if rep:
            seconds.append(took)
    median = statistics.median(seconds)
    return {
        "n": requests,
        "prompt": prompt,
        "output": output,
        "s": [round(each, 4) for each in seconds],
        "out_tok_s": round(requests * output / median, 1),
        "total_tok_s": round(requests * (output + prompt) / median, 1),
        "steps": round((llm.stats().steps - steps) / (reps + 1)),  # of one repetition
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help=f"one of {sorted(p.name for p in SHAPES.iterdir())}, or any")
    parser.add_argument("--cases", default="b1,b8,b64,b256,prefill")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], type=keyword, metavar="NAME=VALUE")
    options = parser.parse_args()
    cases = {name: case(name) for name in options.cases.split(",")}
    shape = SHAPES / options.model
    path = str(shape) if shape.is_dir() else resolve_model(options.model)
    vocab = load_spec(path).vocab_size
    began = time.perf_counter()
    keywords: dict[str, Any] = {
        "load_format": "dummy" if shape.is_dir() else "auto",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "device": options.device,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "enforce_eager": options.eager,
        **dict(options.set),
    }
    with LLM(path, **keywords) as llm:
        ready = round(time.perf_counter() - began, 2)
        show({"shape": options.model, "case": "start_s", "value": ready})
        rng = random.Random(0)
        for name, sizes in cases.items():
            figures = measure(llm, rng, vocab, sizes, options.reps)
            show({"shape": options.model, "case": name, **figures})


def show(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
