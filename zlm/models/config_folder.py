"""ModelSpec from a Hugging Face folder: config.json and the small files beside it.

Keys that a config.json leaves out mean what transformers' configuration classes mean by that, so a
family's row in ``FAMILIES`` holds those defaults. Both generations of config.json are read: rope in
``rope_theta``/``rope_scaling`` or ``rope_parameters``, ``sliding_window_pattern`` or
``layer_types``, ``torch_dtype`` or ``dtype``.
"""

import difflib
from pathlib import Path
from typing import Any

import msgspec

from zlm.config import ModelSpec, PoolingSpec, RopeSpec
from zlm.errors import ModelError
from zlm.models import config_bert, config_pooling
from zlm.models.config_fields import Fields, read_fields
from zlm.models.config_generation import OFF, find_generation_config, generation_defaults
from zlm.models.config_rope import check_rope, longest_context, read_rope
from zlm.models.config_tokens import TokenNames, folder_tokens
from zlm.weights.safetensors import folder_dtype

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3TextModel": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    **dict.fromkeys(config_bert.ARCHITECTURES, "bert"),
}
BARE = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")  # decoders without a head
MODEL_TYPES = {  # for a config.json without ``architectures``
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees everything


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's config.json means by an absent key. 0: derived from other keys."""

    vocab_size: int = 0  # 0: must be given
    num_heads: int = 0  # 0: must be given
    num_kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden_size / heads
    max_position: int
    window: int = 0  # sliding_window
    tie: bool = False
    theta: float = 10000.0
    activation: str = "silu"
    activation_key: str = "hidden_act"
    bos: int | None = None
    eos: int | None = None


FAMILIES = {
    "bert": Family(max_position=512),
    "llama": Family(max_position=2048, bos=1, eos=2),
    "mistral": Family(num_kv_heads=8, max_position=131072, window=4096, bos=1, eos=2),
    "qwen2": Family(num_kv_heads=32, max_position=32768, window=4096),
    "qwen3": Family(num_kv_heads=32, head_dim=128, max_position=32768, window=4096),
    "gemma3": Family(
        vocab_size=262208,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_position=131072,
        window=4096,
        tie=True,
        theta=1000000.0,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        bos=2,
        eos=1,
    ),
}


def folder_spec(folder: Path, generation_config: str) -> ModelSpec:
    """Return the facts of the checkpoint in *folder*; see ``zlm.models.config.load_spec``."""
    outer = read_fields(_config_file(folder))
    family = _family_name(outer)
    _refuse_quantized(outer)
    text = outer.part("text_config")
    config = text or outer
    if family == "bert":
        spec = config_bert.bert_spec(config, _architecture(outer))
    else:
        spec = _geometry(config, outer, family)
        spec = msgspec.structs.replace(spec, **_family_facts(config, spec, FAMILIES[family]))
        check_rope(spec.rope, spec.head_dim, config.source)
    spec = _with_pooling(spec, outer, folder)
    generation = find_generation_config(generation_config, folder)
    defaults = FAMILIES[family]
    bos, eos = folder_tokens(
        [outer, text] if text else [outer],
        generation,
        TokenNames(folder),
        vocab_size=spec.vocab_size,
        default_bos=defaults.bos,
        default_eos=defaults.eos,
    )
    ignored = Fields({}, generation.source) if generation_config in OFF else generation
    return msgspec.structs.replace(
        spec,
        bos_token_id=bos,
        eos_token_ids=eos,
        checkpoint_dtype=_dtype(config, outer, folder),
        generation=generation_defaults(ignored),
    )


def _with_pooling(spec: ModelSpec, config: Fields, folder: Path) -> ModelSpec:
    """Return *spec* with what is made of hidden states, if the checkpoint is no model of text."""
    if spec.pooling is not None and spec.pooling.num_labels:
        return spec
    if config_pooling.has_modules(folder):
        pooling = config_pooling.pipeline(folder, config, spec)
        return msgspec.structs.replace(spec, pooling=pooling)
    if spec.bidirectional:
        return msgspec.structs.replace(spec, pooling=PoolingSpec(kind="mean"))
    if _architecture(config) in BARE:
        can_generate = spec.tie_embeddings  # else there is no head
        return msgspec.structs.replace(spec, pooling=PoolingSpec(), can_generate=can_generate)
    return spec


def _architecture(config: Fields) -> str:
    return next(iter(config.names("architectures")), "")


def _config_file(folder: Path) -> Path:
    path = folder / "config.json"
    if path.is_file():
        return path
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_fields(adapter).text("base_model_name_or_path", "an unnamed model")
        raise ModelError(f"{folder} holds an adapter for {base}, not a model: serve that model")
    raise ModelError(f"{folder} is no model folder: it has no config.json")


def _family_name(config: Fields) -> str:
    named = config.names("architectures")
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = config.text("model_type", "")
    if not named and model_type in MODEL_TYPES:
        return MODEL_TYPES[model_type]
    name = named[0] if named else model_type
    if not name:
        raise ModelError(f"{config.source} names no architecture: it has no architectures key")
    known = list(ARCHITECTURES) if named else list(MODEL_TYPES)
    nearest = difflib.get_close_matches(name, known, 1, 0.0)[0]
    raise ModelError(
        f"{config.source}: architecture {name} is not supported. Supported: {', '.join(known)} "
        f"(nearest: {nearest})"
    )


def _refuse_quantized(config: Fields) -> None:
    for key in ("quantization_config", "compression_config", "quantization"):
        part = config.part(key)
        if part is None or not part.values:
            continue
        method = part.values.get("quant_method") or part.values.get("quant_algo") or "an unnamed"
        bits = part.values.get("bits")
        width = f" ({bits}-bit)" if isinstance(bits, int) else ""
        raise ModelError(
            f"{config.source}: this checkpoint is quantized with the {method} method{width}, which "
            "is not supported yet. Use the unquantized checkpoint or a GGUF file of the model"
        )


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
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        tie_embeddings=tie,
        weights_format="safetensors",
    )


def _family_facts(config: Fields, spec: ModelSpec, defaults: Family) -> dict[str, Any]:
    """Return the ModelSpec fields in which the families differ."""
    family = spec.architecture
    rope = _rope(config, spec, defaults, "full_attention")
    facts: dict[str, Any] = {"rope": rope, "max_position": longest_context(rope, spec.max_position)}
    bias = config.flag("attention_bias", False) and family in ("llama", "qwen3", "gemma3")
    facts["qkv_bias"] = bias or family == "qwen2"
    facts["o_bias"] = bias
    facts["mlp_bias"] = family == "llama" and config.flag("mlp_bias", False)
    facts["qk_norm"] = family in ("qwen3", "gemma3")
    facts["layer_windows"] = _layer_windows(config, spec, defaults, facts["max_position"])
    if family == "gemma3":
        facts |= _gemma_facts(config, spec, defaults)
    return facts


def _gemma_facts(config: Fields, spec: ModelSpec, defaults: Family) -> dict[str, Any]:
    bidirectional = config.flag("use_bidirectional_attention", False)
    return {
        "bidirectional": bidirectional,
        "can_generate": not bidirectional,
        "norm_plus_one": True,
        "sandwich_norms": True,
        "embedding_scale": spec.hidden_size**0.5,
        "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": _softcap(config, "attn_logit_softcapping"),
        "final_softcap": _softcap(config, "final_logit_softcapping"),
        "rope_sliding": _rope(config, spec, defaults, "sliding_attention"),
    }


def _softcap(config: Fields, key: str) -> float:
    return config.number(key, 1.0) if config.has(key) else 0.0


def _rope(config: Fields, spec: ModelSpec, defaults: Family, layer_type: str) -> RopeSpec:
    """Read the rotary embedding; older Gemma 3 files keep the sliding layers' base apart."""
    theta = defaults.theta
    if spec.architecture == "gemma3" and layer_type == "sliding_attention":
        theta = config.number("rope_local_base_freq", 10000.0)
        nested = config.part("rope_parameters")
        if nested is None or layer_type not in nested.values:
            return RopeSpec(theta=theta)
        config = Fields({"rope_parameters": nested.values}, config.source)
    return read_rope(config, layer_type, default_theta=theta, position=spec.max_position)


def _layer_windows(
    config: Fields, spec: ModelSpec, defaults: Family, context: int
) -> tuple[int, ...]:
    """Return the sliding window of each layer, 0 where the layer sees everything.

    A window as long as the context sees everything, too.
    """
    family, num_layers = spec.architecture, spec.num_layers
    null = "sliding_window" in config.values and not config.has("sliding_window")
    window = 0 if null else config.integer("sliding_window", defaults.window, least=0)
    if family in ("qwen2", "qwen3") and not config.flag("use_sliding_window", False):
        window = 0
    if family == "gemma3" and config.flag("use_bidirectional_attention", False):
        window = window // 2 + 1  # on either side, the token itself included
    if window >= context:
        window = 0
    if family == "mistral":
        return (window,) * num_layers
    if family == "llama" or window == 0:
        return (0,) * num_layers
    types = config.names("layer_types")
    if types:
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown or len(types) != num_layers:
            raise config.wrong(
                "layer_types", f"{num_layers} times full_attention or sliding_attention"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if family == "gemma3":
        pattern = config.integer(
            "sliding_window_pattern", config.integer("_sliding_window_pattern", GEMMA_PATTERN)
        )
        return tuple(0 if (i + 1) % pattern == 0 else window for i in range(num_layers))
    first = config.integer("max_window_layers", 28, least=0)
    return tuple(window if i >= first else 0 for i in range(num_layers))


def _dtype(config: Fields, outer: Fields, folder: Path) -> str:
    """Return the type of the weights: as config.json says, else as the first weights file does."""
    for fields in (config, outer):
        for key in ("dtype", "torch_dtype"):
            if fields.has(key):
                return fields.text(key, "").removeprefix("torch.")
    return folder_dtype(folder)
