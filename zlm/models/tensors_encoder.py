"""The tensors of encoders, by architecture: names and shapes from the spec. Imports no torch.

Names are Hugging Face's, without the prefix of the whole encoder; ``zlm.weights.encoder_names``
brings every checkpoint to them.
"""

from zlm.config import ModelSpec

Shapes = dict[str, tuple[int, ...]]

# Beginnings of names of what is trained with an encoder and not used here, and of buffers.
SURPLUS = {
    "bert": (
        "pooler.",
        "cls.",
        "lm_head.",
        "vocab_",
        "embeddings.position_ids",
        "embeddings.token_type_i",
    ),
    "modernbert": ("head.", "decoder."),
    "nomic_bert": ("pooler.", "cls."),
}


def bert_tensors(spec: ModelSpec) -> Shapes:
    """Return name → shape of every tensor of an encoder of BERT's family."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    tensors = _embeddings(spec)
    tensors["embeddings.position_embeddings.weight"] = (
        spec.max_position + spec.position_offset,
        hidden,
    )
    if spec.relative_buckets:
        name = "encoder.relative_attention_bias.weight"
        tensors[name] = (spec.relative_buckets, spec.num_heads)
    layer: Shapes = {}
    for name in ("query", "key", "value"):
        layer |= _product(f"attention.self.{name}", hidden, hidden, bias=True)
    layer |= _product("attention.output.dense", hidden, hidden, bias=True)
    layer |= _product("intermediate.dense", inner, hidden, bias=True)
    layer |= _product("output.dense", hidden, inner, bias=True)
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        layer |= _norm(name, hidden, bias=True)
    return tensors | _layers("encoder.layer", spec.num_layers, layer)


def modernbert_tensors(spec: ModelSpec) -> Shapes:
    """Return name → shape of every tensor of ModernBERT."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    tensors: Shapes = {"embeddings.tok_embeddings.weight": (spec.vocab_size, hidden)}
    for name in ("embeddings.norm", "final_norm"):
        tensors |= _norm(name, hidden, bias=spec.norm_bias)
    layer = _product("self_attn.qkv_proj", 3 * hidden, hidden, bias=spec.qkv_bias)
    layer |= _product("self_attn.o_proj", hidden, hidden, bias=spec.o_bias)
    layer |= _product("mlp.Wi", 2 * inner, hidden, bias=spec.mlp_bias)
    layer |= _product("mlp.Wo", hidden, inner, bias=spec.mlp_bias)
    for name in ("attn_norm", "mlp_norm"):
        layer |= _norm(name, hidden, bias=spec.norm_bias)
    tensors |= _layers("layers", spec.num_layers, layer)
    without = ("layers.0.attn_norm.weight", "layers.0.attn_norm.bias")
    return {name: shape for name, shape in tensors.items() if name not in without}


def nomic_bert_tensors(spec: ModelSpec) -> Shapes:
    """Return name → shape of every tensor of Nomic BERT; q, k and v may be one."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layer: Shapes = {}
    if spec.fused_products:
        layer |= _product("self_attn.qkv_proj", 3 * hidden, hidden, bias=spec.qkv_bias)
    else:
        for name in ("q_proj", "k_proj", "v_proj"):
            layer |= _product(f"self_attn.{name}", hidden, hidden, bias=spec.qkv_bias)
    layer |= _product("self_attn.o_proj", hidden, hidden, bias=spec.o_bias)
    layer |= _product("mlp.gate_proj", inner, hidden, bias=spec.mlp_bias)
    layer |= _product("mlp.up_proj", inner, hidden, bias=spec.mlp_bias)
    layer |= _product("mlp.down_proj", hidden, inner, bias=spec.mlp_bias)
    for name in ("post_attention_layernorm", "post_mlp_layernorm"):
        layer |= _norm(name, hidden, bias=True)
    return _embeddings(spec) | _layers("layers", spec.num_layers, layer)


ENCODERS = {
    "bert": bert_tensors,
    "modernbert": modernbert_tensors,
    "nomic_bert": nomic_bert_tensors,
}


def head_tensors(spec: ModelSpec) -> Shapes:
    """Return name → shape of the dense layers on top that are in the model's own files."""
    tensors: Shapes = {}
    for dense in () if spec.pooling is None else spec.pooling.dense:
        if not dense.path:
            tensors |= _product(dense.name, dense.out_features, dense.in_features, bias=dense.bias)
            if dense.norm:
                tensors |= _norm(dense.norm, dense.out_features, bias=dense.norm_bias)
    return tensors


def _embeddings(spec: ModelSpec) -> Shapes:
    tensors: Shapes = {"embeddings.word_embeddings.weight": (spec.vocab_size, spec.hidden_size)}
    if spec.token_types:
        name = "embeddings.token_type_embeddings.weight"
        tensors[name] = (spec.token_types, spec.hidden_size)
    return tensors | _norm("embeddings.LayerNorm", spec.hidden_size, bias=True)


def _product(name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    tensors: Shapes = {f"{name}.weight": (rows, columns)}
    return tensors | ({f"{name}.bias": (rows,)} if bias else {})


def _norm(name: str, size: int, *, bias: bool) -> Shapes:
    tensors: Shapes = {f"{name}.weight": (size,)}
    return tensors | ({f"{name}.bias": (size,)} if bias else {})


def _layers(prefix: str, count: int, layer: Shapes) -> Shapes:
    return {
        f"{prefix}.{index}.{name}": shape for index in range(count) for name, shape in layer.items()
    }
