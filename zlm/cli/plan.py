"""``zlm plan MODEL --gpu-memory 8GB``: whether a model fits a GPU, without one and without weights.

Reads the checkpoint's description only (of a Hugging Face id, its small files are fetched), takes
the flags of ``zlm serve``, and shows the memory plan that the server would make: what each part
takes, the longest context, and how many sequences run at once.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from zlm.cli.failures import told
from zlm.cli.parse import parse
from zlm.cli.values import size_bytes
from zlm.config import AUTO_LENGTHS, Config, Resolved, kv_cache_type, resolve, with_purpose
from zlm.errors import ConfigError
from zlm.process.logs import escape

if TYPE_CHECKING:
    import torch

    from zlm.worker.gpu_forecast import Forecast

DOES_NOT_FIT = 1
DEFAULT_CAPABILITY = "8.0"
LENGTHS = (1024, 4096, 16384, 65536)  # tokens of the sequences that are counted
EPILOG = """\
All flags of zlm serve that concern the model, the KV cache and the scheduler are taken too. With
several sizes there is a line for each. The exit status is 1 if the model fits none.
"""


def main(words: Sequence[str]) -> int:
    """Run ``zlm plan`` with its arguments *words*; return the exit status."""
    options, flags = _parser().parse_known_args(list(words))

    def work() -> int:
        sizes = [_size(text) for value in options.gpu_memory for text in value.split(",")]
        config, _ = parse([options.model, "--device", "cuda", *flags])
        capability = _capability(options.compute_capability)
        return _show(*described(config), sizes, capability)

    return told("plan", work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zlm plan",
        description="Tell whether a model fits a GPU, with what context and concurrency.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a Hugging Face id")
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        action="append",
        required=True,
        help="memory of the card: 8GB or 24GiB; several, with commas or by repeating the flag",
    )
    parser.add_argument(
        "--compute-capability",
        metavar="X.Y",
        default=DEFAULT_CAPABILITY,
        help=f"of the card; 7.5 for an RTX 20 (default: {DEFAULT_CAPABILITY}, which has bfloat16)",
    )
    return parser


def described(config: Config) -> tuple[Resolved, str]:
    """Return *config* and the facts of its model, or of what each of several GPUs has of it, and
    what that is, in words.

    No weights are fetched or read. Raises ConfigError if it cannot be shared out so.
    """
    from zlm.models import shares
    from zlm.models.config import load_spec
    from zlm.weights.resolve import resolve_description

    options = config.model
    path = resolve_description(
        options.model, revision=options.revision, download_dir=options.download_dir
    )
    spec = with_purpose(load_spec(path, generation_config="none"), options)
    if spec.pooling is not None:
        raise ConfigError(f"{options.model} gives vectors or scores: it has no KV cache to plan")
    parallel = config.parallel
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    shares.check(spec, ranks)
    shares.check_stages(spec, stages)
    whole = resolve(config, spec, model_path=path, tokenizer_path=path, device="cuda")
    stage = shares.largest_stage(spec, stages)
    share = ""
    if parallel.num_workers > 1:
        share = f"{parallel.num_workers} GPUs; memory is that of each"
    if stages > 1:
        first, last = shares.layers_of_stage(spec, stage, stages)
        share += f" of stage {stage}, which has most to hold: layers {first} to {last - 1}"
    return shares.resolved_of_worker(whole, stage * ranks), share


def _show(resolved: Resolved, share: str, sizes: list[int], capability: tuple[int, int]) -> int:
    from zlm.worker import gpu_forecast, gpu_measure  # they need torch

    model, cache = resolved.config.model, resolved.config.cache
    dtype = gpu_measure.compute_dtype(model.dtype, cache.kv_cache_dtype, resolved.spec, capability)
    name = str(dtype).removeprefix("torch.")
    kept = kv_cache_type(cache.kv_cache_dtype, name, resolved.spec, resolved.device)
    is_auto = model.max_model_len in AUTO_LENGTHS
    length = "auto" if is_auto else f"{resolved.max_model_len} tokens"
    limits = f"{length}, {resolved.max_num_seqs} sequences"
    cache_note = f", its cache in {kept}" if kept != name else ""
    print(f"{model.model} in {name}{cache_note}: --max-model-len {limits}")
    print(f"{share}\n" if share else "")
    cards = [gpu_forecast.absent_card(size, capability) for size in sizes]
    outcomes = []
    for card in cards:
        outcome, shown = gpu_forecast.forecast(resolved, card, dtype), resolved
        if is_auto and outcome.longest:
            shown = msgspec.structs.replace(resolved, max_model_len=outcome.longest)
            outcome = gpu_forecast.forecast(shown, card, dtype)
        print("\n".join(_lines(shown, outcome, dtype)), end="\n\n")
        outcomes.append(outcome)
    return 0 if any(outcome.plan for outcome in outcomes) else DOES_NOT_FIT


def _lines(resolved: Resolved, outcome: "Forecast", dtype: "torch.dtype") -> list[str]:
    from zlm.worker import gpu_forecast

    if outcome.plan is None:
        lines = [f"{outcome.card.name}: it does not fit", escape(outcome.reason)]
        if flags := gpu_forecast.lighter(resolved, outcome.card, dtype):
            lines.append(f"it would fit with {', or with '.join(flags)}")
        return lines
    longest = resolved.max_model_len
    lengths = [length for length in LENGTHS if length < longest]
    counts = [
        f"{gpu_forecast.concurrency(resolved, outcome.plan, length)} of {length}"
        for length in (*lengths, longest)
    ]
    return [
        *outcome.plan.table(),
        f"it fits; the longest --max-model-len would be {outcome.longest}",
        f"sequences at once, by their tokens: {', '.join(counts)}",
    ]


def _size(text: str) -> int:
    try:
        size = size_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--gpu-memory {text}: {error}") from error
    if size < 2**30:
        raise ConfigError(f"--gpu-memory {text}: a card has at least 1 GiB")
    return size


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and (minor or "0").isdecimal()):
        raise ConfigError(f"--compute-capability {text}: must be two numbers such as 7.5")
    return int(major), int(minor or "0")
