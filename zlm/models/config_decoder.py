"""ModelSpec of a decoder from its config.json: sizes, switches, rotary embedding, windows.

Both generations of config.json are read: rope in ``rope_theta``/``rope_scaling`` or
``rope_parameters``, ``sliding_window_pattern`` or ``layer_types``.
"""

from typing import Any

import msgspec

from zlm.config import ExpertsSpec, Gemma4Spec, ModelSpec, RopeSpec
from zlm.errors import ModelError
from zlm.models.config_families import ACTIVATIONS, FAMILIES, Family
from zlm.models.config_fields import Fields
from zlm.models.config_rope import check_rope, longest_context, read_rope

SLIDING_THETA = {
    "gemma3": 10000.0,
    "gemma4": 10000.0,
    "olmo3": 500000.0,
}  # families whose sliding layers turn alone
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def decoder_spec(config: Fields, outer: Fields, family: str) -> ModelSpec:
    """Return the facts of a *family*'s model that *config* describes, without its tokens.

    outer: the whole config.json, where *config* is the text half of a multimodal one. Raises
    ModelError, naming the key, for what is missing or not supported.
    """
    defaults = FAMILIES[family]
    spec = _geometry(config, outer, family)
    spec = msgspec.structs.replace(spec, **_common_facts(config, spec, defaults))
    if family in FACTS:
        spec = msgspec.structs.replace(spec, **FACTS[family](config, spec))
    windows = _layer_windows(config, spec, defaults)
    spec = msgspec.structs.replace(spec, layer_windows=windows)
    check_rope(spec.rope, spec.head_dim, config.source)
    return spec


def _geometry(config: Fields, outer: Fields, family: str) -> ModelSpec:
    """Read sizes and switches that all families share."""
    defaults = FAMILIES[family]
    required = ["hidden_size", "intermediate_size", "num_hidden_layers"]
    required += [] if defaults.num_heads else ["num_attention_heads"]
    required += [] if defaults.vocab_size else ["vocab_size"]
    config.require(required)
    hidden = config.integer("hidden_size", 0)
    heads = config.integer("num_attention_heads", defaults.num_heads)
    kv_default = defaults.num_kv_heads
    if "num_key_value_heads" in config.values or not kv_default:
        kv_default = heads  # null means one for each head
    kv_heads = config.integer("num_key_value_heads", kv_default)
    if heads % kv_heads:
        raise ModelError(
            f"{config.source}: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    if not (config.has("head_dim") or defaults.head_dim) and hidden % heads:
        raise ModelError(
            f"{config.source}: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        )
    activation = config.text(defaults.activation_key, defaults.activation)
    if activation not in ACTIVATIONS:
        raise ModelError(f"{config.source}: activation {activation} is not supported")
    tie = config.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", defaults.tie))
    return ModelSpec(
        architecture=family,
        vocab_size=config.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 0),
        num_layers=config.integer("num_hidden_layers", 0),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.integer("head_dim", defaults.head_dim or hidden // heads),
        max_position=config.integer("max_position_embeddings", defaults.max_position),
        rms_norm_eps=config.number("rms_norm_eps", defaults.eps),
        activation=ACTIVATIONS[activation],
        tie_embeddings=tie,
        weights_format="safetensors",
    )


def _common_facts(config: Fields, spec: ModelSpec, defaults: Family) -> dict[str, Any]:
    """Return what is read alike for all families: rotary embedding and biases."""
    rope = read_rope(
        config, "full_attention", default_theta=defaults.theta, position=spec.max_position
    )
    facts: dict[str, Any] = {"rope": rope, "max_position": longest_context(rope, spec.max_position)}
    if defaults.attention_bias is not None:
        bias = config.flag("attention_bias", defaults.attention_bias)
        facts |= {"qkv_bias": bias, "o_bias": bias}
    if defaults.mlp_bias:
        facts["mlp_bias"] = config.flag("mlp_bias", False)
    if spec.architecture in SLIDING_THETA:
        facts["rope_sliding"] = _sliding_rope(config, spec)
    return facts


def _sliding_rope(config: Fields, spec: ModelSpec) -> RopeSpec:
    """Read the rotary embedding of sliding layers; older Gemma 3 files keep their base apart."""
    theta = SLIDING_THETA[spec.architecture]
    if spec.architecture == "gemma3":
        theta = config.number("rope_local_base_freq", theta)
    nested = config.part("rope_parameters")
    if nested is None or "sliding_attention" not in nested.values:
        return RopeSpec(theta=theta)
    alone = Fields({"rope_parameters": nested.values}, config.source)
    return read_rope(alone, "sliding_attention", default_theta=theta, position=spec.max_position)


# --------------------------------------------------------------------- what single families have


def _gemma2(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {
        "norm_plus_one": True,
        "sandwich_norms": True,
        "embedding_scale": spec.hidden_size**0.5,
        "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": _softcap(config, "attn_logit_softcapping", 50.0),
        "final_softcap": _softcap(config, "final_logit_softcapping", 30.0),
    }


def _gemma3(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    bidirectional = config.flag("use_bidirectional_attention", False)
    return _gemma2(config, spec) | {
        "qk_norm": True,
        "bidirectional": bidirectional,
        "can_generate": not bidirectional,
        "attention_softcap": _softcap(config, "attn_logit_softcapping", 0.0),
        "final_softcap": _softcap(config, "final_logit_softcapping", 0.0),
    }


def _gemma4(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    if config.flag("enable_moe_block", False):
        raise ModelError(f"{config.source}: enable_moe_block, Gemma 4 of experts, is not supported")
    if config.text("use_bidirectional_attention", "") == "all":
        raise ModelError(
            f"{config.source}: use_bidirectional_attention all is not supported for Gemma 4"
        )
    if spec.qkv_bias:
        raise ModelError(f"{config.source}: attention_bias is not supported for Gemma 4")
    vocab = config.integer("vocab_size_per_layer_input", spec.vocab_size)
    size = config.integer("hidden_size_per_layer_input", 256, least=0)
    if size and vocab != spec.vocab_size:
        raise config.wrong("vocab_size_per_layer_input", f"vocab_size, which is {spec.vocab_size}")
    own = Gemma4Spec(
        full_head_dim=config.integer("global_head_dim", 512),
        full_kv_heads=spec.num_kv_heads,
        keys_are_values=config.flag("attention_k_eq_v", False),
        shared_layers=config.integer("num_kv_shared_layers", 0, least=0),
        wide_shared_mlp=config.flag("use_double_wide_mlp", False),
        per_layer_size=size,
    )
    if own.keys_are_values:
        heads = config.integer("num_global_key_value_heads", spec.num_kv_heads)
        own = msgspec.structs.replace(own, full_kv_heads=heads)
    facts: dict[str, Any] = {
        "gemma4": _with_layer_config(own, config),
        "qk_norm": True,
        "sandwich_norms": True,
        "embedding_scale": spec.hidden_size**0.5,
        "attention_scale": 1.0,
        "final_softcap": _softcap(config, "final_logit_softcapping", 0.0),
    }
    if not config.has("rope_parameters"):
        facts["rope"] = RopeSpec(theta=1e6, scaling="proportional", partial_factor=0.25)
    return facts


def _with_layer_config(own: Gemma4Spec, config: Fields) -> Gemma4Spec:
    """Return *own* as ``per_layer_config`` has it, which newer files name full layers' heads in."""
    part = config.part("per_layer_config")
    for key in () if part is None else part.values:
        layer = part.part(key) if part is not None else None
        if layer is not None:
            own = msgspec.structs.replace(
                own,
                full_head_dim=layer.integer("head_dim", own.full_head_dim),
                full_kv_heads=layer.integer("num_key_value_heads", own.full_kv_heads),
            )
    return own


def _softcap(config: Fields, key: str, default: float) -> float:
    """Read a soft cap; null means none, and an absent key *default*."""
    if key in config.values and not config.has(key):
        return 0.0
    return config.number(key, 1.0) if config.has(key) else default


def _olmo2(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"qk_norm": True, "qk_norm_whole": True, "post_norms": True}


def _phi3(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"fused_products": True}


def _smollm3(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    interval = config.integer("no_rope_layer_interval", 4)
    turns = [(i + 1) % interval != 0 for i in range(spec.num_layers)]
    if config.values.get("no_rope_layers"):
        given = config.numbers("no_rope_layers")  # 1: a layer that turns
        if len(given) < spec.num_layers:
            raise config.wrong("no_rope_layers", f"{spec.num_layers} times 0 or 1")
        turns = [bool(value) for value in given[: spec.num_layers]]
    return {"rope_layers": () if all(turns) else tuple(turns)}


def _qwen2(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"qk_norm": True}


def _mixtral(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", config.integer("num_experts", 8)),
        chosen=config.integer("num_experts_per_tok", 2),
        size=spec.intermediate_size,
    )
    return {"experts": _checked(experts, config)}


def _qwen2_moe(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    experts = _qwen_experts(config, spec, count=60, chosen=4, size=1408)
    shared = config.integer("shared_expert_intermediate_size", 5632)
    return {
        "qkv_bias": config.flag("qkv_bias", True),
        "experts": msgspec.structs.replace(experts, shared_size=shared),
    }


def _qwen3_moe(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    experts = _qwen_experts(config, spec, count=128, chosen=8, size=768)
    return {"qk_norm": True, "experts": experts}


def _qwen_experts(
    config: Fields, spec: ModelSpec, *, count: int, chosen: int, size: int
) -> ExpertsSpec:
    step = config.integer("decoder_sparse_step", 1)
    plain = set(config.numbers("mlp_only_layers")) if config.has("mlp_only_layers") else set()
    layers = tuple(i not in plain and (i + 1) % step == 0 for i in range(spec.num_layers))
    experts = ExpertsSpec(
        count=config.integer("num_experts", config.integer("num_local_experts", count)),
        chosen=config.integer("num_experts_per_tok", chosen),
        size=config.integer("moe_intermediate_size", size),
        layers=() if all(layers) else layers,
        normalize=config.flag("norm_topk_prob", False),
    )
    return _checked(experts, config)


def _gpt_oss(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", config.integer("num_experts", 128)),
        chosen=config.integer("num_experts_per_tok", config.integer("experts_per_token", 4)),
        size=spec.intermediate_size,
        layout="fused",
        biases=True,
        limit=config.number("swiglu_limit", 7.0),
        alpha=config.number("swiglu_alpha", 1.702),
    )
    facts: dict[str, Any] = {"experts": _checked(experts, config), "attention_sinks": True}
    if not (config.has("rope_scaling") or config.has("rope_parameters")):
        theta = config.number("rope_theta", FAMILIES["gpt_oss"].theta)
        facts["rope"] = RopeSpec(
            theta=theta, scaling="yarn", factor=32.0, original_max_position=4096, truncate=False
        )
    return facts


def _llama4(config: Fields, spec: ModelSpec) -> dict[str, Any]:
    step = config.integer("interleave_moe_layer_step", 1)
    layers = tuple((i + 1) % step == 0 for i in range(spec.num_layers))
    if config.has("moe_layers"):
        chosen = set(config.numbers("moe_layers"))
        layers = tuple(i in chosen for i in range(spec.num_layers))
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", 16),
        chosen=config.integer("num_experts_per_tok", 1),
        size=spec.intermediate_size,
        layers=() if all(layers) else layers,
        shared_size=spec.intermediate_size,
        shared_gate=False,
        sigmoid=True,
        layout="halves",
    )
    still = None
    if config.values.get("attn_temperature_tuning", True):  # older files have a number there
        still = RopeSpec(
            partial_factor=0.0,
            scaling="temperature",
            factor=config.number("attn_scale", 0.1),
            original_max_position=config.integer("floor_scale", 8192),
        )
    rope = msgspec.structs.replace(spec.rope, neighbours=True)
    normed = config.flag("use_qk_norm", True)
    if normed:  # what comes after rotation and so undoes its factor
        rope = msgspec.structs.replace(rope, attention_factor=1.0)
    return _smollm3(config, spec) | {
        "rope": rope,
        "rope_still": still,
        "qk_norm_plain": normed,
        "intermediate_size": config.integer("intermediate_size_mlp", 16384),
        "experts": _checked(experts, config) if any(layers) else None,
    }


def _checked(experts: ExpertsSpec, config: Fields) -> ExpertsSpec:
    if experts.chosen > experts.count:
        raise config.wrong("num_experts_per_tok", f"at most {experts.count}, the experts there are")
    return experts


FACTS = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}


# -------------------------------------------------------------------------------- sliding windows


def _layer_windows(config: Fields, spec: ModelSpec, defaults: Family) -> tuple[int, ...]:
    """Return the window of each layer (``first_seen``), 0 where the layer sees everything.

    A window as long as the context sees everything, too.
    """
    num_layers = spec.num_layers
    window = _window(config, spec, defaults)
    if defaults.windows == "none" or window == 0:
        return (0,) * num_layers
    if defaults.windows == "all":
        return (window,) * num_layers
    types = config.names("layer_types")
    if types:
        other = CHUNKED if defaults.windows == "chunks" else SLIDING
        if set(types) - {FULL, other} or len(types) != num_layers:
            raise config.wrong("layer_types", f"{num_layers} times {FULL} or {other}")
        return tuple(0 if kind == FULL else window for kind in types)
    first = config.integer("max_window_layers", 28, least=0)
    if defaults.windows == "late":
        slides = [i >= first for i in range(num_layers)]
    elif defaults.windows == "early":
        slides = [i % 2 == 0 and i < first for i in range(num_layers)]
    elif defaults.windows in ("still", "chunks"):
        still = defaults.windows == "still"
        slides = [turns != still for turns in spec.rope_layers or (True,) * num_layers]
    else:
        cycle = config.integer(
            "sliding_window_pattern", config.integer("_sliding_window_pattern", defaults.cycle)
        )
        slides = [(i + 1) % cycle != 0 for i in range(num_layers)]
    return tuple(window if yes else 0 for yes in slides)


def _window(config: Fields, spec: ModelSpec, defaults: Family) -> int:
    """Return the window of layers that have one: of tokens that slide, or of chunks; 0: none."""
    chunks = defaults.windows == "chunks"
    key = "attention_chunk_size" if chunks else "sliding_window"
    null = key in config.values and not config.has(key)
    window = 0 if null else config.integer(key, defaults.window, least=0)
    if defaults.window_switch and not config.flag("use_sliding_window", False):
        return 0
    if spec.bidirectional:
        window = window // 2 + 1  # on either side, the token itself included
    if spec.gemma4 is not None:
        return window  # without a window a layer would be of the other kind
    if window >= spec.max_position:
        return 0
    return -window if chunks else window
