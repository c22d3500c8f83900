"""The tensors a model consists of: names and shapes from the spec, checked against a checkpoint.

Names are Hugging Face's for a text model (``model.layers.0.self_attn.q_proj.weight``), the form in
which ``zlm.weights`` gives every checkpoint. A tensor that is missing, left over or of another
shape is an error that names it. Imports no torch.
"""

from collections.abc import Iterable

from zlm.config import ExpertsSpec, ModelSpec
from zlm.errors import ModelError
from zlm.models.tensors_encoder import ENCODERS, SURPLUS, head_tensors
from zlm.models.tensors_gemma4 import gemma4_tensors, unused
from zlm.weights.cache_scales import is_cache_scale

MAX_NAMED = 5  # tensors an error message lists by name
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor that the model is made of; a tied head is not one."""
    if spec.architecture in ENCODERS:
        return ENCODERS[spec.architecture](spec) | head_tensors(spec)
    hidden = spec.hidden_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    if spec.gemma4 is not None:
        tensors |= gemma4_tensors(spec)
    else:
        for index in range(spec.num_layers):
            layer = _attention_tensors(spec) | _mlp_tensors(spec, index)
            tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        tensors["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings and spec.pooling is None:
        tensors[HEAD] = (spec.vocab_size, hidden)
    return tensors | head_tensors(spec)


def _attention_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    products = [  # name, rows, columns, has a bias
        ("self_attn.q_proj", q, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, q, spec.o_bias),
    ]
    if spec.fused_products:
        products[:3] = [("self_attn.qkv_proj", q + 2 * kv, hidden, spec.qkv_bias)]
    tensors = _with_biases(products)
    norms = ["post_attention_layernorm"]
    if not spec.post_norms:
        norms += ["input_layernorm"]
    if spec.sandwich_norms:
        norms += ["pre_feedforward_layernorm"]
    if spec.sandwich_norms or spec.post_norms:
        norms += ["post_feedforward_layernorm"]
    tensors |= {f"{name}.weight": (hidden,) for name in norms}
    if spec.attention_sinks:
        tensors["self_attn.sinks"] = (spec.num_heads,)
    if spec.qk_norm:
        sizes = (q, kv) if spec.qk_norm_whole else (head_dim, head_dim)
        tensors |= {"self_attn.q_norm.weight": sizes[:1], "self_attn.k_norm.weight": sizes[1:]}
    return tensors


def has_experts(spec: ModelSpec, index: int) -> bool:
    """Whether a mixture of experts is the MLP of layer *index*."""
    return spec.experts is not None and (not spec.experts.layers or spec.experts.layers[index])


def _mlp_tensors(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    if has_experts(spec, index):
        return _mixture_tensors(spec)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    products = [
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ]
    if spec.fused_products:
        products[:2] = [("mlp.gate_up_proj", 2 * inner, hidden, spec.mlp_bias)]
    return _with_biases(products)


def _mixture_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, experts = spec.hidden_size, spec.experts
    assert experts is not None
    if experts.layout == "fused":
        return _fused_tensors(experts, hidden)
    if experts.layout == "halves":
        fused = _fused_tensors(experts, hidden)
        fused["mlp.gate.weight"] = fused.pop("mlp.router.weight")
        return fused | _shared_tensors(experts, hidden)
    projections = {"gate_proj": experts.size, "up_proj": experts.size, "down_proj": hidden}
    tensors: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.count, hidden)}
    for name, rows in projections.items():
        shape = (rows, hidden + experts.size - rows)
        if experts.layout == "stacked":
            tensors[f"mlp.experts.{name}.weight"] = (experts.count, *shape)
        else:
            for index in range(experts.count):
                tensors[f"mlp.experts.{index}.{name}.weight"] = shape
    return tensors | _shared_tensors(experts, hidden)


def _shared_tensors(experts: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    shared = experts.shared_size
    if not shared:
        return {}
    tensors: dict[str, tuple[int, ...]] = {}
    if experts.shared_gate:
        tensors["mlp.shared_expert_gate.weight"] = (1, hidden)
    for name, rows in (("gate_proj", shared), ("up_proj", shared), ("down_proj", hidden)):
        tensors[f"mlp.shared_expert.{name}.weight"] = (rows, hidden + shared - rows)
    return tensors


def _fused_tensors(experts: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    count, size = experts.count, experts.size
    tensors: dict[str, tuple[int, ...]] = {
        "mlp.router.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * size),
        "mlp.experts.down_proj": (count, size, hidden),
    }
    if experts.biases:
        tensors |= {
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj_bias": (count, 2 * size),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    return tensors


def _with_biases(products: list[tuple[str, int, int, bool]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of *products*: name, rows, columns, whether there is a bias."""
    tensors: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, bias in products:
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)
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
    surplus = unused(spec) if spec.gemma4 is not None else SURPLUS.get(spec.architecture, ())
    unexpected = [name for name in unexpected if not name.startswith(surplus)]
    unexpected = [name for name in unexpected if not is_cache_scale(name)]
    if unexpected:
        raise ModelError(
            f"the checkpoint holds {_listing(unexpected)}, which a {spec.architecture} model of "
            "its configuration does not have"
        )


def check_shape(expected: dict[str, tuple[int, ...]], name: str, shape: Iterable[int]) -> None:
    """Raise ModelError if tensor *name* does not have the shape that the spec implies."""
    if is_cache_scale(name):  # one, or one a KV head: the layer sees to that
        return
    wanted = expected[EMBEDDING if name == HEAD else name]
    if tuple(shape) != wanted:
        raise ModelError(
            f"tensor {name} has shape {list(shape)}, the configuration implies {list(wanted)}"
        )


def _listing(names: list[str]) -> str:
    noun = "the tensor" if len(names) == 1 else f"{len(names)} tensors:"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{noun} {', '.join(names[:MAX_NAMED])}{more}"
