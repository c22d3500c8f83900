"""The keywords of ``LLM`` and ``AsyncLLM``: vLLM's names, and which field of ``Config`` each sets.

Defaults are not repeated here: a keyword that is left out is what ``zlm.config`` says.
"""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, TypedDict, get_args, get_origin

import msgspec

from zlm.config import Config, check
from zlm.errors import ConfigError, clip
from zlm.unsupported import NODES, UNSUPPORTED


class EngineOptions(TypedDict, total=False):
    """How a model is loaded and run; meaning and defaults are those of the flags of ``zlm serve``.

    Without ``seed`` every process draws fresh randomness. With ``skip_tokenizer_init`` prompts are
    token ids, and so are outputs. The last five are taken and change nothing: ``stats`` may always
    be asked, preempted sequences are computed again, no code from a checkpoint is ever run,
    every model may be put to sleep, and workers are processes of this machine.
    """

    tokenizer: str | os.PathLike[str] | None
    skip_tokenizer_init: bool
    task: str
    runner: str
    convert: str
    revision: str | None
    download_dir: str | os.PathLike[str] | None
    dtype: Any  # a name, or torch's own
    quantization: str | None
    load_format: str
    generation_config: str
    chat_template: str | None  # the template itself, or the path of a file that holds it
    seed: int | None
    max_model_len: int | Literal["auto"] | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    scheduling_policy: Literal["fcfs", "priority"]
    block_size: int
    gpu_memory_utilization: float
    kv_cache_dtype: str
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    device: Literal["auto", "cpu", "cuda"]
    cpu_threads: int | None
    enforce_eager: bool
    deterministic: bool
    attention_backend: Literal["auto", "triton", "sdpa"]
    disable_log_stats: bool
    swap_space: float
    trust_remote_code: bool
    enable_sleep_mode: bool
    distributed_executor_backend: Literal["mp"] | None


OF_NODES = {"nnodes", "node_rank", "master_addr", "master_port", "headless", "cluster_key"}
FIELDS = {  # by part of Config; a name that differs there stands after the keyword
    "model": (
        "model tokenizer skip_tokenizer_init task runner convert revision download_dir dtype "
        "quantization load_format generation_config chat_template seed max_model_len"
    ),
    "scheduler": (
        "max_num_seqs max_num_batched_tokens enable_chunked_prefill scheduling_policy:policy"
    ),
    "cache": (
        "block_size:block_size_tokens gpu_memory_utilization kv_cache_dtype kv_cache_memory_bytes "
        "num_gpu_blocks_override:num_blocks_override enable_prefix_caching"
    ),
    "parallel": "tensor_parallel_size pipeline_parallel_size device cpu_threads",
    "compute": "enforce_eager deterministic attention_backend",
}


def config_of(model: str | os.PathLike[str], options: EngineOptions) -> Config:
    """Return the configuration that *options* give.

    Raises TypeError for an unknown keyword, ConfigError for a value of another type or range.
    """
    check_keywords("LLM", options, EngineOptions)
    given: dict[str, Any] = {"model": model, **options}
    executor = given.get("distributed_executor_backend")
    if executor not in (None, "mp"):
        raise ConfigError(
            f"LLM(): distributed_executor_backend must be 'mp', got {clip(repr(executor))}: its "
            f"workers are processes of this machine, {NODES}",
            param="distributed_executor_backend",
        )
    parts: dict[str, Any] = {}
    for part, words in FIELDS.items():
        struct = Config.__annotations__[part]
        values = {}
        for keyword, _, field in (word.partition(":") for word in words.split()):
            if keyword in given:
                kind = struct.__annotations__[field or keyword]
                values[field or keyword] = _converted(keyword, given[keyword], kind)
        parts[part] = struct(**values)
    config = Config(**parts)
    check(config)
    return config


def check_keywords(call: str, given: Mapping[str, object], known: type) -> None:
    """Raise TypeError, as Python does, for a keyword that the TypedDict *known* lacks."""
    for name in given.keys() - known.__annotations__.keys():
        near = get_close_matches(name, known.__annotations__, n=1, cutoff=0.5)
        why = UNSUPPORTED.get(f"--{name.replace('_', '-')}")
        hint = f"; did you mean {near[0]!r}?" if near else ""
        hint = hint if why is None else f", which zlm does not have: {why}"
        hint = f": {NODES}" if name in OF_NODES else hint
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")


def _converted(keyword: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(_plain(value), kind)
    except msgspec.ValidationError as error:
        message = f"LLM(): {keyword} must be {_in_words(kind)}, got {clip(repr(value))}"
        raise ConfigError(message, param=keyword) from error


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    names = {int: "an integer", float: "a number", str: "a string", NoneType: "None"}
    return " or ".join(map(_in_words, get_args(kind))) or names.get(kind, "True or False")


def _plain(value: Any) -> Any:
    """Return a path or one of torch's types as text, everything else as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else value
