"""``zlm bench offline MODEL`` and ``zlm bench latency MODEL``: the offline ``LLM``, measured.

``offline`` runs cases of many requests and tells tokens a second; ``latency`` runs one batch again
and again and tells how long it takes. Prints a JSON document a line as it goes, or a table.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from zlm.cli.failures import told
from zlm.errors import ConfigError
from zlm.loadtest.offline import Case, measured
from zlm.offline_options import config_of
from zlm.weights.resolve import resolve_model

EPILOG = "--set gives any keyword of LLM, in JSON or plain text: --set kv_cache_memory_bytes=1e9."


def main(words: Sequence[str], name: str = "offline") -> int:
    """Run ``zlm bench offline`` or ``latency`` with arguments *words*; return the exit status."""
    options = _parser(name).parse_args(list(words))
    run = _latency if name == "latency" else _offline
    return told(f"bench {name}", lambda: run(options))


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"zlm bench {name}",
        description="Measure the offline LLM on random prompts, without HTTP and tokenizer.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    if name == "latency":
        parser.add_argument("--batch-size", type=int, default=1, help="(default: 1)")
        parser.add_argument("--input-tokens", "--input-len", type=int, default=128, help="(128)")
        parser.add_argument("--output-tokens", "--output-len", type=int, default=128, help="(128)")
        parser.add_argument("--reps", "--num-iters", type=int, default=10, help="(default: 10)")
    else:
        parser.add_argument(
            "--cases",
            default="b1,b8,b64",
            help="b1, b8, b64, b256, prefill or REQUESTS:INPUT:OUTPUT (default: b1,b8,b64)",
        )
        parser.add_argument("--reps", type=int, default=3, help="after a warm-up (default: 3)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--max-model-len", type=int, help="(default: the longest case)")
    parser.add_argument("--max-num-seqs", type=int, help="(default: the largest case)")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="GPUs (1)")
    parser.add_argument("--eager", "--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--label", action="append", default=[], metavar="NAME=VALUE", help="put into the JSON"
    )
    return parser


def _offline(options: argparse.Namespace) -> int:
    cases = [Case.parse(text) for text in options.cases.split(",")]
    labels = _pairs(options, "label") or {"model": options.model}
    for figures in _measured(options, cases):
        print(json.dumps({**labels, **figures}), flush=True)
    return 0


def _latency(options: argparse.Namespace) -> int:
    sizes = f"{options.batch_size}:{options.input_tokens}:{options.output_tokens}"
    start, figures = _measured(options, [Case.parse(sizes)])
    print(
        f"{options.batch_size} x {options.input_tokens} tokens in, {options.output_tokens} out: "
        f"mean {figures['s_mean']} s, p50 {figures['s_p50']}, p90 {figures['s_p90']}, "
        f"p99 {figures['s_p99']} of {options.reps}; {figures['out_tok_s']} output tokens/s"
    )
    labels = _pairs(options, "label") or {"model": options.model}
    print(json.dumps({"bench": "latency", **labels, "start_s": start["value"], **figures}))
    return 0


def _measured(options: argparse.Namespace, cases: Sequence[Case]) -> Any:
    if options.reps < 1:
        raise ConfigError("--reps must be at least 1")
    keywords: dict[str, Any] = {
        "load_format": options.load_format,
        "dtype": options.dtype,
        "device": options.device,
        "max_model_len": options.max_model_len or max(c.prompt + c.output for c in cases),
        "max_num_seqs": options.max_num_seqs or max(c.requests for c in cases),
        "enforce_eager": options.eager,
        "tensor_parallel_size": options.tensor_parallel_size,
        **_pairs(options, "set"),
    }
    try:
        config_of(options.model, keywords)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"--set: {error}") from error
    return measured(resolve_model(options.model), cases, options.reps, keywords)


def _pairs(options: argparse.Namespace, flag: str) -> dict[str, Any]:
    """Return names and values of a flag that takes ``NAME=VALUE``, in JSON or plain text."""
    found: dict[str, Any] = {}
    for text in getattr(options, flag):
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--{flag} {text}: must be NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
