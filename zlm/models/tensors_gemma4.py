"""The tensors of Gemma 4 (text): names and shapes from the spec. Imports no torch."""

from zlm.config import ModelSpec, layer_heads, shared_from


def gemma4_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor but the token embedding and the head."""
    own, hidden = spec.gemma4, spec.hidden_size
    assert own is not None
    size, layers = own.per_layer_size, spec.num_layers
    tensors: dict[str, tuple[int, ...]] = {}
    if size:
        tensors["model.embed_tokens_per_layer.weight"] = (spec.vocab_size, layers * size)
        tensors["model.per_layer_model_projection.weight"] = (layers * size, hidden)
        tensors["model.per_layer_projection_norm.weight"] = (size,)
    for index in range(layers):
        layer = _attention(spec, index) | _rest(spec, index)
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return tensors | {"model.norm.weight": (hidden,)}


def unused(spec: ModelSpec) -> tuple[str, ...]:
    """Return how names begin that checkpoints may have and the model does not use."""
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    shared = range(shared_from(spec), spec.num_layers)
    return tuple(f"model.layers.{i}.self_attn.{part}" for i in shared for part in parts)


def _attention(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    own, hidden = spec.gemma4, spec.hidden_size
    assert own is not None
    kv_heads, head_dim = layer_heads(spec, index)
    q, kv = spec.num_heads * head_dim, kv_heads * head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head_dim,),
    }
    if index < shared_from(spec):
        tensors["self_attn.k_proj.weight"] = (kv, hidden)
        tensors["self_attn.k_norm.weight"] = (head_dim,)
        if not own.keys_are_values or spec.layer_windows[index]:
            tensors["self_attn.v_proj.weight"] = (kv, hidden)
    return tensors


def _rest(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    own, hidden = spec.gemma4, spec.hidden_size
    assert own is not None
    is_wide = own.wide_shared_mlp and index >= shared_from(spec)
    inner, size = spec.intermediate_size * (2 if is_wide else 1), own.per_layer_size
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors: dict[str, tuple[int, ...]] = {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "layer_scalar": (1,),
    }
    if size:
        norms += ["post_per_layer_input_norm"]
        tensors["per_layer_input_gate.weight"] = (size, hidden)
        tensors["per_layer_projection.weight"] = (hidden, size)
    return tensors | {f"{name}.weight": (hidden,) for name in norms}
