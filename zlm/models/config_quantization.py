"""What config.json says of a quantized checkpoint: the method, or that it cannot be read. No torch.

The layout of each weight shows in its tensors (``zlm.weights.quantized``); here it is told early,
before a weight is downloaded or read, whether all of it can be.
"""

from collections.abc import Iterator

from zlm.errors import ModelError
from zlm.models.config_fields import Fields

KEYS = ("quantization_config", "compression_config", "quantization")
# compressed-tensors: its names of what a weight is stored as.
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
SUPPORTED = ("awq", "gptq", "compressed-tensors", "fbgemm_fp8", "fp8", "modelopt", "mxfp4")
GPTQ_BITS = (2, 4, 8)
FUSED = ("weight_input", "weight_output")  # rotations that the stored weights have in them


def quantization_method(*configs: Fields | None) -> str | None:
    """Return the method of the first of *configs* that is quantized, None if none is.

    Of SUPPORTED, or ``gptq_v2``. Raises ModelError, naming the key, for what cannot be read.
    """
    part = next(_parts(configs), None)
    return None if part is None else _method(part)


def static_inputs(*configs: Fields | None) -> bool:
    """Tell whether the scheme has activations rounded by scales that the checkpoint brings."""
    for part in _parts(configs):
        groups = part.part("config_groups")
        for group in () if groups is None else groups.values.values():
            inputs = group.get("input_activations") if isinstance(group, dict) else None
            if isinstance(inputs, dict) and not inputs.get("dynamic"):
                return True
        if part.values.get("activation_scheme") == "static":
            return True
        if part.values.get("quant_algo") == "FP8":  # ModelOpt's, which has one scale a product
            return True
    return False


def cache_type(*configs: Fields | None) -> str:
    """Return the type that the checkpoint's keys and values have scales for; empty: none we have.

    That is fp8_e4m3, of compressed-tensors' kv_cache_scheme and of ModelOpt's kv_cache_quant_algo.
    """
    for part in _parts(configs):
        scheme = part.values.get("kv_cache_scheme")
        kind = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, dict) else ()
        if kind == ("float", 8) or part.values.get("kv_cache_quant_algo") == "FP8":
            return "fp8_e4m3"
    return ""


def _parts(configs: tuple[Fields | None, ...]) -> Iterator[Fields]:
    """Yield what *configs* say of quantization."""
    for config in configs:
        for key in KEYS:
            part = None if config is None else config.part(key)
            if part is not None and part.values:
                yield part


def _method(part: Fields) -> str | None:
    by_algorithm = "modelopt" if "quant_algo" in part.values else "unnamed"
    name = part.values.get("quant_method") or by_algorithm
    method = str(name).replace("-", "_").replace("compressed_tensors", "compressed-tensors")
    if method == "awq":
        _allow(part, "bits", part.integer("bits", part.integer("w_bit", 4)), (4,))
        _allow(part, "version", part.text("version", "gemm").lower(), ("gemm",))
    elif method == "gptq":
        _allow(part, "bits", part.integer("bits", 4), GPTQ_BITS)
        form = part.text("checkpoint_format", "gptq")
        _allow(part, "checkpoint_format", form, ("gptq", "gptq_v2"))
        return form
    elif method == "compressed-tensors":
        _check_compressed(part)
    elif method == "fp8":
        _allow(part, "fmt", part.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    elif method == "modelopt":
        if part.values.get("quant_algo") is None:  # only keys and values are
            return None
        _allow(part, "quant_algo", part.text("quant_algo", ""), ("FP8",))
        return "fp8"
    elif method not in SUPPORTED:
        bits = part.values.get("bits")
        width = f" ({bits}-bit)" if isinstance(bits, int) else ""
        raise ModelError(
            f"{part.source}: this checkpoint is quantized with the {name} method{width}, which is "
            f"not supported (supported: {', '.join(SUPPORTED)}, and GGUF files). Use the "
            "unquantized checkpoint or another of these"
        )
    return method


def _check_compressed(part: Fields) -> None:
    _allow(part, "format", part.text("format", FORMATS[0]), (*FORMATS, "mixed-precision"))
    sparsity = part.part("sparsity_config")
    form = "dense" if sparsity is None else sparsity.text("format", "dense")
    if sparsity is not None and form != "dense":
        raise ModelError(f"{sparsity.source}: sparse weights ({form}) are not supported")
    groups = part.part("config_groups")
    for key in () if groups is None else groups.values:
        group = groups.part(key) if groups is not None else None
        if group is not None and group.has("format"):
            _allow(group, "format", group.text("format", ""), FORMATS)
        stored = None if group is None else group.part("weights")
        if stored is not None:
            _allow(stored, "num_bits", stored.integer("num_bits", 8), (4, 8))
    _check_rotations(part.part("transform_config"))


def _check_rotations(transforms: Fields | None) -> None:
    """Refuse rotations of activations, which nothing here computes."""
    schemes = None if transforms is None else transforms.part("config_groups")
    if schemes is None:
        return
    for name, scheme in schemes.values.items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for where in applied if isinstance(applied, list) else (None,):
            if not isinstance(where, dict) or where.get("location") not in FUSED:
                raise ModelError(
                    f"{schemes.source}: {name} rotates more than weights, which is not supported"
                )


def _allow(part: Fields, key: str, value: object, supported: tuple[object, ...]) -> None:
    if value not in supported:
        listing = ", ".join(map(str, supported))
        raise ModelError(f"{part.source}: {key} {value} is not supported (supported: {listing})")
