"""Hand-written config.json files for tests of load_spec."""

import json
from pathlib import Path
from typing import Any

from zlm.config import ModelSpec
from zlm.models.config import load_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, name: str, values: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    """Write LLAMA with *changes* (None removes a key) as a config.json and load it."""
    values = {k: v for k, v in (LLAMA | changes).items() if v is not None}
    write(folder, "config.json", values)
    return load_spec(folder)
