"""The tensors a model consists of: names and shapes from the spec, checked against a checkpoint.

Names are Hugging Face's for a text model (``model.layers.0.self_attn.q_proj.weight``), the form in
which ``zlm.weights`` gives every checkpoint. A tensor that is missing, left over or of another
shape is an error that names it. Imports no torch.
"""

from collections.abc import Iterable

from zlm.config import ModelSpec
from zlm.errors import ModelError

MAX_NAMED = 5  # tensors an error message lists by name
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Of BERT checkpoints: heads that were trained with the encoder and are not used, and a buffer.
BERT_SURPLUS = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_i")


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor that the model is made of; a tied head is not one."""
    if spec.architecture == "bert":
        return bert_tensors(spec)
    hidden = spec.hidden_size
    layer = _layer_tensors(spec)
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings and spec.pooling is None:
        tensors[HEAD] = (spec.vocab_size, hidden)
    return tensors


def bert_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor of an encoder of BERT's family and of its head."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (spec.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (
            spec.max_position + spec.position_offset,
            hidden,
        ),
    }
    if spec.token_types:
        tensors["embeddings.token_type_embeddings.weight"] = (spec.token_types, hidden)
    products = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    norms = ["embeddings.LayerNorm"]
    for index in range(spec.num_layers):
        layer = f"encoder.layer.{index}"
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for name, shape in products.items():
            tensors[f"{layer}.{name}.weight"] = shape
            tensors[f"{layer}.{name}.bias"] = shape[:1]
    for name in norms:
        tensors[f"{name}.weight"] = tensors[f"{name}.bias"] = (hidden,)
    for dense in () if spec.pooling is None else spec.pooling.dense:
        if not dense.path:
            tensors[f"{dense.name}.weight"] = (dense.out_features, dense.in_features)
            tensors[f"{dense.name}.bias"] = (dense.out_features,)
    return tensors


def _layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    products = [  # name, rows, columns, has a bias
        ("self_attn.q_proj", q, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, q, spec.o_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ]
    tensors: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, bias in products:
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors |= {f"{name}.weight": (hidden,) for name in norms}
    if spec.qk_norm:
        tensors |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return tensors


def check_names(
    spec: ModelSpec, expected: dict[str, tuple[int, ...]], present: Iterable[str]
) -> None:
    """Raise ModelError, naming them, if tensors are missing or left over.

    A head that comes with tied embeddings is neither.
    """
    found = set(present)
    missing = [name for name in expected if name not in found]
    if missing == [HEAD]:
        raise ModelError(
            f"the checkpoint lacks {HEAD}, and its configuration says that the embeddings are not "
            "tied (tie_word_embeddings is false)"
        )
    if missing:
        raise ModelError(f"the checkpoint lacks {_listing(missing)}")
    unexpected = sorted(found - expected.keys() - {HEAD})
    if spec.architecture == "bert":
        unexpected = [name for name in unexpected if not name.startswith(BERT_SURPLUS)]
    if unexpected:
        raise ModelError(
            f"the checkpoint holds {_listing(unexpected)}, which a {spec.architecture} model of "
            "its configuration does not have"
        )


def check_shape(expected: dict[str, tuple[int, ...]], name: str, shape: Iterable[int]) -> None:
    """Raise ModelError if tensor *name* does not have the shape that the spec implies."""
    wanted = expected[EMBEDDING if name == HEAD else name]
    if tuple(shape) != wanted:
        raise ModelError(
            f"tensor {name} has shape {list(shape)}, the configuration implies {list(wanted)}"
        )


def _listing(names: list[str]) -> str:
    noun = "the tensor" if len(names) == 1 else f"{len(names)} tensors:"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{noun} {', '.join(names[:MAX_NAMED])}{more}"
