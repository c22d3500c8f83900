"""ModelSpec from a Hugging Face folder: config.json and the small files beside it.

What a decoder's config.json says is read in ``config_decoder``, an encoder's in ``config_encoder``;
here is what goes for all: the family's name, tokens, sampling defaults, the weights' type
(``torch_dtype`` or ``dtype``), pooling.
"""

import difflib
from pathlib import Path

import msgspec

from zlm.config import ModelSpec, PoolingSpec
from zlm.errors import ModelError
from zlm.models import config_encoder, config_pooling
from zlm.models.config_decoder import decoder_spec
from zlm.models.config_families import ARCHITECTURES, BARE, FAMILIES, HEAD, MODEL_TYPES
from zlm.models.config_fields import Fields, read_fields
from zlm.models.config_generation import OFF, find_generation_config, generation_defaults
from zlm.models.config_quantization import cache_type, quantization_method, static_inputs
from zlm.models.config_tokens import TokenNames, folder_tokens
from zlm.weights.safetensors import folder_dtype

MODELOPT = "hf_quant_config.json"  # where ModelOpt says what it did; config.json may not


def folder_spec(folder: Path, generation_config: str) -> ModelSpec:
    """Return the facts of the checkpoint in *folder*; see ``zlm.models.config.load_spec``."""
    outer = read_fields(_config_file(folder))
    family = _family_name(outer)
    text = outer.part("text_config")
    _check_text_half(text, family)
    modelopt = folder / MODELOPT
    quantized = outer, text, read_fields(modelopt) if modelopt.exists() else None
    quantization = quantization_method(*quantized)
    config = text or outer
    if family in config_encoder.FAMILIES:
        spec = config_encoder.encoder_spec(config, family, _architecture(outer), folder)
    else:
        spec = decoder_spec(config, outer, family)
    experts = spec.experts
    if experts is not None and experts.layout == "halves" and quantization == "compressed-tensors":
        # Its tools take the experts apart before they quantize them.
        experts = msgspec.structs.replace(experts, layout="each")
        spec = msgspec.structs.replace(spec, experts=experts)
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
        quantization=quantization,
        static_inputs=static_inputs(*quantized),
        kv_cache_dtype=cache_type(*quantized),
        generation=generation_defaults(ignored),
    )


def _with_pooling(spec: ModelSpec, config: Fields, folder: Path) -> ModelSpec:
    """Return *spec* with what is made of hidden states, if the checkpoint is no model of text."""
    if spec.pooling is not None and spec.pooling.num_labels:
        return spec
    if _architecture(config).endswith(HEAD):
        pooling = config_pooling.decoder_classifier(config, spec.hidden_size)
        return msgspec.structs.replace(spec, pooling=pooling, can_generate=False)
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


def _check_text_half(text: Fields | None, family: str) -> None:
    """See that the text half of a multimodal checkpoint is of the family its name stands for."""
    kind = family if text is None else text.text("model_type", family)
    if kind != family and MODEL_TYPES.get(kind) != family:
        source = "" if text is None else text.source
        raise ModelError(
            f"{source}: a text half of model_type {kind} is not supported ({family} is)"
        )


def _dtype(config: Fields, outer: Fields, folder: Path) -> str:
    """Return the type of the weights: as config.json says, else as the first weights file does."""
    for fields in (config, outer):
        for key in ("dtype", "torch_dtype"):
            if fields.has(key):
                return fields.text(key, "").removeprefix("torch.")
    stored = folder_dtype(folder)
    return stored if "float" in stored and "float8" not in stored else "bfloat16"
