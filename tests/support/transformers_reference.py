"""A transformers model with the weights of a checkpoint as zlm reads them, on any device.

transformers' own reading of GGUF files is tested against ours in tests/golden; here a model is made
in a second, in any type, without the package that its reading needs. Its greedy continuation of a
prompt P is D exactly if, for each k, the likeliest token after P + D[:k] is D[k]; all k are seen in
one forward pass over P + D, without padding or a cache.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.models.config import load_spec
from zlm.weights.load import open_weights


@dataclass(frozen=True)
class Reference:
    """A transformers model that computes continuations."""

    model: Any

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits after each of *token_ids*, as float32: [T, V]."""
        inputs = torch.tensor([token_ids], device=self.model.device)
        return self.model(input_ids=inputs, use_cache=False).logits[0].float()

    def along(self, prompt: list[int], answer: list[int]) -> Tensor:
        """Return the logits that each token of *answer* is chosen by: [len(answer), V]."""
        return self.logits(prompt + answer[:-1])[len(prompt) - 1 :]

    @torch.inference_mode()
    def largest_hidden(self, token_ids: list[int]) -> float:
        """Return the largest absolute value of the residual stream between layers."""
        inputs = torch.tensor([token_ids], device=self.model.device)
        states = self.model(input_ids=inputs, use_cache=False, output_hidden_states=True)
        return max(state.abs().max().item() for state in states.hidden_states[:-1])


def load(path: Path, dtype: torch.dtype, device: str, attention: str = "eager") -> Reference:
    """Return transformers' model of the GGUF file *path*, which is of Llama or Gemma 3."""
    import transformers

    spec = load_spec(path)
    config_class = getattr(transformers, CONFIGS[spec.architecture])
    config = config_class(**common_keys(spec), **_family_keys(spec))
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    weights = open_weights(path, spec, torch.device(device))
    values = {name: weights.get(name) for name in weights.names()}
    weights.close()
    missing = model.load_state_dict(values, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return Reference(model.eval())


CONFIGS = {"llama": "LlamaConfig", "gemma3": "Gemma3TextConfig"}


def common_keys(spec: ModelSpec) -> dict[str, Any]:
    """Return what config.json says of a model with tied embeddings, of whatever family."""
    assert spec.tie_embeddings
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": True,
    }


def _family_keys(spec: ModelSpec) -> dict[str, Any]:
    full = {"rope_type": "default", "rope_theta": spec.rope.theta}
    assert spec.rope.scaling == "none"
    if spec.architecture == "llama":
        return {"rope_parameters": full}
    assert spec.rope_sliding is not None and spec.rope_sliding.scaling == "none"
    sliding = {"rope_type": "default", "rope_theta": spec.rope_sliding.theta}
    kinds = ["sliding_attention" if window else "full_attention" for window in spec.layer_windows]
    return {
        "layer_types": kinds,
        "sliding_window": max(spec.layer_windows),
        "query_pre_attn_scalar": round(spec.attention_scale**-2),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }
