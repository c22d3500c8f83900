"""Issue 6: ``--max-model-len auto``, asked of a process of its own."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_checkpoint

from zlm.config import CacheOptions, Config, ModelOptions
from zlm.errors import ConfigError
from zlm.models.config import load_spec
from zlm.ops import kv_cache
from zlm.supervisor.resolve import resolve_config
from zlm.worker.longest import longest

WIDE = torch.float32  # which the CPU may choose


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path, "llama")
    return tmp_path


def config(model: Path, cache: CacheOptions, length: object = "auto") -> Config:
    return Config(model=ModelOptions(model=str(model), max_model_len=length), cache=cache)  # type: ignore[arg-type]


def test_what_fits_is_found_and_resolved(model: Path) -> None:
    """In a process, as the server does it; -1 is vLLM's word for it."""
    spec = load_spec(model)
    block_bytes = spec.num_layers * kv_cache.block_bytes(16, spec.num_kv_heads, spec.head_dim, WIDE)
    cache = CacheOptions(kv_cache_memory_bytes=6 * block_bytes)
    resolved = resolve_config(config(model, cache, -1))
    assert resolved.max_model_len == resolved.config.model.max_model_len == 5 * 16  # and null


def test_all_of_it_fits_a_large_memory(model: Path) -> None:
    whole = resolve_config(config(model, CacheOptions(), None))
    assert longest(whole) == whole.max_model_len


def test_what_does_not_fit_at_all_is_told(model: Path) -> None:
    cache = CacheOptions(kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes 1000 is less than the"):
        resolve_config(config(model, cache))
