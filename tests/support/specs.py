"""Facts of models too small to compute anything, for tests that only pass them on."""

from typing import Any

from zlm.config import ModelSpec


def small_spec(**facts: Any) -> ModelSpec:
    """A one-layer, one-head model of 256 tokens and a context of 64; *facts* replace any of it."""
    plain = {
        "architecture": "llama",
        "vocab_size": 256,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_position": 64,
        "rms_norm_eps": 1e-5,
    }
    return ModelSpec(**{**plain, **facts})
