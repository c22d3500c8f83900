"""ModelSpec of ModernBERT and Nomic BERT, encoders with rotary positions, from their config.json.

Nomic BERT's keys come in two spellings: transformers' (``hidden_size``) and those of the code that
its checkpoints were published with (``n_embd``).
"""

from pathlib import Path

from zlm.config import ModelSpec, RopeSpec
from zlm.errors import ModelError
from zlm.models.config_bert import ACTIVATIONS, head_dim
from zlm.models.config_fields import Fields
from zlm.models.config_rope import check_rope, read_rope
from zlm.weights.safetensors import folder_tensors

GLOBAL_THETA, LOCAL_THETA = 160000.0, 10000.0  # ModernBERT's
NOMIC_THETA = 1000.0
NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
NOMIC_REFUSED = {  # key → the values that ask for what is there
    "prenorm": (False,),
    "causal": (False,),
    "use_rms_norm": (False,),
    "parallel_block": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "moe_every_n_layers": (0,),
}
SWIGLU = "swiglu"


def modernbert_spec(config: Fields) -> ModelSpec:
    """Return the facts of ModernBERT that *config* describes, without tokens and head."""
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    num_layers = config.integer("num_hidden_layers", 22)
    position = config.integer("max_position_embeddings", 8192)
    size = head_dim(config, hidden, heads)
    bias = config.flag("attention_bias", False)
    return ModelSpec(
        architecture="modernbert",
        vocab_size=config.integer("vocab_size", 50368),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 1152),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size,
        max_position=position,
        rms_norm_eps=config.number("norm_eps", 1e-5),
        activation=_activation(config, "hidden_activation", "gelu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        norm_bias=config.flag("norm_bias", False),
        fused_products=True,
        layer_windows=_windows(config, num_layers, position),
        rope=_rope(config, "full_attention", "global_rope_theta", GLOBAL_THETA, position, size),
        rope_sliding=_rope(
            config, "sliding_attention", "local_rope_theta", LOCAL_THETA, position, size
        ),
        bidirectional=True,
        can_generate=False,
    )


def nomic_bert_spec(config: Fields, folder: Path) -> ModelSpec:
    """Return the facts of Nomic BERT that *config* describes, without tokens and head.

    Whether q, k and v are one tensor is seen in the weights of *folder*.
    """
    for key, harmless in NOMIC_REFUSED.items():
        if config.has(key) and config.values[key] not in harmless:
            raise ModelError(f"{config.source}: {key} {config.values[key]} is not supported")
    if config.text("activation_function", SWIGLU) != SWIGLU:
        raise config.wrong("activation_function", SWIGLU)
    values = {NOMIC_KEYS.get(key, key): value for key, value in config.values.items()}
    config = Fields(values, config.source)
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    position = config.integer("max_position_embeddings", 2048)
    if config.has("rotary_scaling_factor"):  # stretched beyond this, which is not done here
        position = min(position, config.integer("max_trained_positions", 2048))
    size = head_dim(config, hidden, heads)
    bias = config.flag("mlp_fc1_bias", False)
    if config.flag("mlp_fc2_bias", False) != bias:
        raise config.wrong("mlp_fc2_bias", "the same as mlp_fc1_bias")
    qkv_bias = config.flag("qkv_proj_bias", False)
    rope = read_rope(config, "full_attention", default_theta=NOMIC_THETA, position=position)
    check_rope(rope, size, config.source)
    return ModelSpec(
        architecture="nomic_bert",
        vocab_size=config.integer("vocab_size", 30528),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 3072),
        num_layers=config.integer("num_hidden_layers", 12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size,
        max_position=position,
        rms_norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=_activation(config, "hidden_act", "silu"),
        qkv_bias=qkv_bias,
        o_bias=qkv_bias,
        mlp_bias=bias,
        fused_products=_is_fused(folder),
        rope=rope,
        bidirectional=True,
        can_generate=False,
        token_types=config.integer("type_vocab_size", 2, least=0),
    )


def _activation(config: Fields, key: str, default: str) -> str:
    named = config.text(key, default)
    if named not in ACTIVATIONS:
        raise ModelError(f"{config.source}: activation {named} is not supported")
    return ACTIVATIONS[named]


def _windows(config: Fields, num_layers: int, position: int) -> tuple[int, ...]:
    """Return each layer's window on either side, the token itself included; 0: all."""
    types = config.names("layer_types")
    if not types:
        every = config.integer("global_attn_every_n_layers", 3)
        types = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    known = {"full_attention", "sliding_attention"}
    if set(types) - known or len(types) != num_layers:
        raise config.wrong("layer_types", f"{num_layers} times full_attention or sliding_attention")
    window = config.integer("local_attention", 128) // 2 + 1
    window = 0 if window >= position else window
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _rope(
    config: Fields, layer_type: str, old_key: str, theta: float, position: int, head_dim: int
) -> RopeSpec:
    theta = config.number(old_key, theta)
    rope = read_rope(config, layer_type, default_theta=theta, position=position)
    check_rope(rope, head_dim, config.source)
    return rope


def _is_fused(folder: Path) -> bool:
    if not any(folder.glob("*.safetensors")):
        return False  # random weights need no file
    return any(".Wqkv." in name for name in folder_tensors(folder))
