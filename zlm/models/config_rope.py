"""Rotary embedding as a checkpoint describes it, brought to ``RopeSpec``.

Three notations are read: ``rope_theta`` beside ``rope_scaling`` (older Hugging Face), a dictionary
``rope_parameters``, flat or one a layer type (newer), and GGUF's ``rope.*`` keys with their
frequency tensors. Frequencies are computed from the RopeSpec elsewhere.
"""

import math
from typing import Any

import msgspec

from zlm.config import RopeSpec
from zlm.errors import ModelError
from zlm.models.config_fields import Fields

KINDS = ("none", "linear", "llama3", "yarn", "longrope", "proportional")
SPELLINGS = {"default": "none", "su": "longrope"}  # other names the kinds go by
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(config: Fields, layer_type: str, *, default_theta: float, position: int) -> RopeSpec:
    """Return the rotary embedding of *layer_type* from Hugging Face's *config*.

    *position* is max_position_embeddings: the original context length where none is named.
    ``rope_scaling``, if it says anything, goes before ``rope_parameters``, as in transformers.
    """
    scaling = config.part("rope_scaling")
    chosen = scaling if scaling and scaling.values else config.part("rope_parameters")
    chosen = chosen or Fields({}, config.source)
    if any(key in chosen.values for key in LAYER_TYPES):
        chosen = chosen.part(layer_type) or Fields({}, chosen.source)
    theta = chosen.number("rope_theta", config.number("rope_theta", default_theta))
    partial = chosen.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    named = chosen.text("rope_type", chosen.text("type", "default"))
    kind = SPELLINGS.get(named, named)
    plain = RopeSpec(theta=theta, partial_factor=partial)
    if kind == "none":
        return plain
    if kind not in KINDS:
        known = ", ".join(KINDS[1:])
        raise ModelError(
            f"{chosen.source}: rope scaling {named!r} is not supported (known: {known})"
        )
    original = position
    if kind != "linear":
        key = "original_max_position_embeddings"
        original = config.integer(key, chosen.integer(key, position))
    values = _SCALINGS[kind](chosen, original, position)
    return msgspec.structs.replace(plain, scaling=kind, **values)


def _linear(rope: Fields, original: int, position: int) -> dict[str, Any]:
    rope.require(["factor"])
    return {"factor": rope.number("factor", 1.0)}


def _llama3(rope: Fields, original: int, position: int) -> dict[str, Any]:
    rope.require(["factor", "low_freq_factor", "high_freq_factor"])
    low = rope.number("low_freq_factor", 1.0)
    high = rope.number("high_freq_factor", 4.0, above=low)
    factor = rope.number("factor", 1.0)
    return {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": original,
    }


def _yarn(rope: Fields, original: int, position: int) -> dict[str, Any]:
    if original == position:
        rope.require(["factor"])
    return {
        "factor": rope.number("factor", position / original),
        "original_max_position": original,
        "attention_factor": rope.optional_number("attention_factor"),
        "beta_fast": rope.optional_number("beta_fast") or 32.0,
        "beta_slow": rope.optional_number("beta_slow") or 1.0,
        "mscale": rope.optional_number("mscale"),
        "mscale_all_dim": rope.optional_number("mscale_all_dim"),
        "truncate": rope.flag("truncate", True),
    }


def _proportional(rope: Fields, original: int, position: int) -> dict[str, Any]:
    return {"factor": rope.number("factor", 1.0)}


def _longrope(rope: Fields, original: int, position: int) -> dict[str, Any]:
    return {
        "factor": rope.number("factor", position / original),
        "original_max_position": original,
        "attention_factor": rope.optional_number("attention_factor"),
        "short_factor": rope.numbers("short_factor"),
        "long_factor": rope.numbers("long_factor"),
    }


_SCALINGS = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def check_rope(rope: RopeSpec, head_dim: int, source: str) -> None:
    """Raise ModelError if *rope* cannot turn heads of *head_dim* values."""
    rotated = int(head_dim * rope.partial_factor)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise ModelError(
            f"{source}: {rotated} of {head_dim} values of a head are to be rotated; an even number "
            "is needed"
        )
    for name in ("short_factor", "long_factor"):
        factors = getattr(rope, name)
        if rope.scaling == "longrope" and len(factors) != rotated // 2:
            raise ModelError(
                f"{source}: {name} has {len(factors)} entries, {rotated // 2} are needed"
            )
        if any(not (math.isfinite(factor) and factor > 0) for factor in factors):
            raise ModelError(f"{source}: {name} must hold numbers greater than 0")


def longest_context(rope: RopeSpec, position: int) -> int:
    """Return the context length in tokens, *position* being max_position_embeddings.

    YaRN is often switched on by hand in a config.json whose max_position_embeddings still is the
    original one; the scaled length counts then.
    """
    if rope.scaling == "yarn":
        return max(position, int(rope.original_max_position * rope.factor))
    return position


# ------------------------------------------------------------------------------------------- GGUF


def gguf_rope(
    keys: Fields,
    *,
    head_dim: int,
    position: int,
    theta: float,
    factors: dict[str, tuple[float, ...]],
) -> RopeSpec:
    """Return the rotary embedding from the ``rope.*`` keys of a GGUF file.

    *keys* has the architecture's prefix stripped. *factors* holds the frequency tensors by name.
    ``rope_freqs`` is how converters store Llama 3's scaling: a divisor a frequency. longrope with
    both lists equal and no attention factor computes exactly that, so it is given back as such.
    """
    dimensions = keys.integer("rope.dimension_count", head_dim)
    plain = RopeSpec(theta=theta, partial_factor=dimensions / head_dim)
    original = keys.integer("rope.scaling.original_context_length", position)
    if "rope_freqs" in factors:
        return msgspec.structs.replace(
            plain,
            scaling="longrope",
            original_max_position=position,
            attention_factor=1.0,
            short_factor=factors["rope_freqs"],
            long_factor=factors["rope_freqs"],
        )
    kind = keys.text("rope.scaling.type", "none")
    if "rope_factors_long" in factors and "rope_factors_short" in factors:
        kind = "longrope"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" and keys.has("rope.scale_linear") and factor != 1.0:
        kind = "linear"
    if kind not in KINDS or kind in ("llama3", "proportional"):
        raise ModelError(f"{keys.source}: rope scaling {kind!r} is not supported")
    if kind == "none":
        return plain
    if kind == "linear":
        return msgspec.structs.replace(plain, scaling="linear", factor=factor)
    scaled = msgspec.structs.replace(
        plain, scaling=kind, factor=factor, original_max_position=original
    )
    attention = keys.optional_number("rope.scaling.attn_factor")
    if kind == "longrope":
        return _gguf_longrope(keys, scaled, attention, position, factors)
    if attention is not None and factor > 1.0:
        attention *= 0.1 * math.log(factor) + 1.0
    return msgspec.structs.replace(
        scaled,
        attention_factor=attention,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _gguf_longrope(
    keys: Fields,
    rope: RopeSpec,
    attention: float | None,
    position: int,
    factors: dict[str, tuple[float, ...]],
) -> RopeSpec:
    missing = [name for name in ("rope_factors_short", "rope_factors_long") if name not in factors]
    if missing:
        raise ModelError(f"{keys.source} lacks the tensor {missing[0]}.weight of longrope")
    return msgspec.structs.replace(
        rope,
        factor=max(1.0, position / rope.original_max_position),
        attention_factor=attention,
        short_factor=factors["rope_factors_short"],
        long_factor=factors["rope_factors_long"],
    )
