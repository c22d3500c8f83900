"""Sampling defaults of a checkpoint: generation_config.json, or the sampling keys of a GGUF file.

Decisions. A file that says ``do_sample: false`` asks for greedy decoding and its temperature,
top_p, top_k and min_p are dead letters (transformers warns of them); they are not taken, and a
server's neutral defaults stay. Without ``do_sample`` they are taken as written, as servers do.
repetition_penalty and max_new_tokens are taken either way. A value out of its range is an error at
start rather than at every request. ``none`` ignores the sampling defaults, not the EOS ids: those
are a fact of the model.
"""

from pathlib import Path

from zlm.config import GenerationDefaults
from zlm.errors import ConfigError
from zlm.models.config_fields import Fields, read_fields, read_fields_if_there

FILE_NAME = "generation_config.json"
OFF = ("none", "vllm")  # spellings of "ignore it"


def find_generation_config(choice: str, folder: Path | None) -> Fields:
    """Return generation_config.json as --generation-config chose it, empty if there is none.

    *choice* is ``auto``, ``none``, or a folder (or the file itself); *folder* is the checkpoint's.
    """
    if choice != "auto" and choice not in OFF:
        path = Path(choice).expanduser()
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"--generation-config {choice}: there is no {FILE_NAME}")
        return read_fields(path)
    return read_fields_if_there(folder / FILE_NAME) if folder else Fields({}, FILE_NAME)


def generation_defaults(fields: Fields) -> GenerationDefaults:
    """Return the sampling defaults in *fields*. Raises ModelError for a value out of range."""
    sampled = fields.flag("do_sample", True)
    return GenerationDefaults(
        temperature=_within(fields, "temperature", 0.0, 2.0) if sampled else None,
        top_p=_within(fields, "top_p", 0.0, 1.0) if sampled else None,
        top_k=_top_k(fields) if sampled else None,
        min_p=_within(fields, "min_p", 0.0, 1.0) if sampled else None,
        repetition_penalty=_positive(fields, "repetition_penalty"),
        max_new_tokens=_optional_integer(fields, "max_new_tokens"),
    )


def gguf_generation(metadata: dict, source: str) -> Fields:
    """Return the sampling keys of GGUF *metadata* under Hugging Face's names."""
    prefix = "general.sampling."
    names = {
        "temp": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found = {theirs: metadata.get(prefix + ours) for ours, theirs in names.items()}
    return Fields(found, source)


def _within(fields: Fields, key: str, low: float, high: float) -> float | None:
    value = fields.optional_number(key)
    if value is not None and not low <= value <= high:
        raise fields.wrong(
            key, f"between {low:g} and {high:g} (--generation-config none ignores it)"
        )
    return value


def _positive(fields: Fields, key: str) -> float | None:
    return fields.number(key, 1.0) if fields.has(key) else None


def _optional_integer(fields: Fields, key: str) -> int | None:
    return fields.integer(key, 1) if fields.has(key) else None


def _top_k(fields: Fields) -> int | None:
    return max(fields.integer("top_k", 0, least=-1), 0) if fields.has("top_k") else None
