"""Types of numbers: what flags call them, and which a device and a checkpoint allow.

Part of ``zlm.config``, which is what others import. No torch: types are names here.
"""

from typing import TYPE_CHECKING

from zlm.errors import ConfigError, clip

if TYPE_CHECKING:
    from zlm.config import Config, ModelSpec

DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
DTYPE_SPELLINGS = {"half": "float16", "float": "float32"}
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8")
KV_CACHE_SPELLINGS = {"fp8": "fp8_e4m3"}
# Peers' names of kernels and of makers.
QUANTIZATION_SPELLINGS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt": "fp8"}
ONLINE_QUANTIZATION = ("fp8", "w4a16")  # what a plain checkpoint is quantized to as it is read


def kv_cache_type(wanted: str, compute_type: str, spec: "ModelSpec", device: str) -> str:
    """Return the type of keys and values for ``--kv-cache-dtype`` *wanted*: no spelling, not auto.

    auto is the compute type, but that of the checkpoint's own cache on a GPU if it names one.
    """
    if wanted != "auto":
        return KV_CACHE_SPELLINGS.get(wanted, wanted)
    return spec.kv_cache_dtype if spec.kv_cache_dtype and device == "cuda" else compute_type


def online_quantization(config: "Config", spec: "ModelSpec") -> str | None:
    """Return what a plain checkpoint is to be quantized to; None: it is not to be, or not plain."""
    wanted = config.model.quantization
    is_plain = spec.quantization is None and spec.weights_format == "safetensors"
    return wanted if is_plain and wanted in ONLINE_QUANTIZATION else None


def check_form(config: "Config", spec: "ModelSpec", device: str) -> None:
    """See that the checkpoint is quantized as the user says, and the type is one *device* has."""
    wanted = config.model.quantization
    form = (spec.quantization or spec.weights_format).removesuffix("_v2")
    online = online_quantization(config, spec)
    if online is not None and device == "cpu":
        raise ConfigError(
            f"--quantization {online}: a checkpoint is quantized as it is read for a GPU only; "
            "leave the flag out, or take a checkpoint that is quantized, such as a GGUF file"
        )
    if wanted is not None and online is None and QUANTIZATION_SPELLINGS.get(wanted, wanted) != form:
        takes_others = device == "cuda" and form == "safetensors"
        others = "" if not takes_others else f"give {' or '.join(ONLINE_QUANTIZATION)}, or "
        raise ConfigError(
            f"--quantization {clip(wanted)}: this checkpoint is not of that kind (its format is "
            f"{form}); {others}leave the flag out and the checkpoint decides"
        )
    dtype = DTYPE_SPELLINGS.get(config.model.dtype, config.model.dtype)
    kv_dtype = config.cache.kv_cache_dtype
    if device == "cpu" and "float16" in (dtype, kv_dtype):
        is_dtype = dtype == "float16"
        flag = f"--dtype {config.model.dtype}" if is_dtype else f"--kv-cache-dtype {kv_dtype}"
        raise ConfigError(
            f"{flag}: the CPU computes in float32 or bfloat16, give one of them or auto"
        )
    if device == "cuda":
        check_kv_dtype(dtype, kv_dtype)
    elif config.compute.deterministic and "bfloat16" in (dtype, kv_dtype):
        raise ConfigError(
            "--deterministic: on a CPU bfloat16 products depend on what else is in a step, give "
            "--dtype float32 or auto, and no --kv-cache-dtype"
        )


def check_kv_dtype(dtype: str, kv_dtype: str) -> None:
    """Raise ConfigError if a GPU that computes in *dtype* cannot keep its cache in *kv_dtype*."""
    kv_type = KV_CACHE_SPELLINGS.get(kv_dtype, kv_dtype)
    if dtype != "auto" and kv_type not in ("auto", "fp8_e4m3", dtype):
        raise ConfigError(
            f"--kv-cache-dtype {kv_dtype}: on a GPU keys and values are kept in the compute type, "
            f"{dtype}, or in fp8: give auto, fp8 or {dtype}, or --dtype {kv_dtype}"
        )
