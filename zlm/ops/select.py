"""Which backend computes: decided once, from the device, its age and the flags."""

import torch

from zlm.errors import ConfigError
from zlm.ops.backend import Ops
from zlm.ops.cpu import CpuOps

MATRIX_UNITS = (8, 0)  # compute capability from which Triton has ``tl.dot``, and cards bfloat16
DEPENDENT_LAUNCH = (9, 0)  # from which a kernel may start before the one before it has ended


def select(
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
    attention: str = "auto",
    deterministic: bool = False,
    spread: bool = False,
    widened_bytes: int = 0,
) -> Ops:
    """Return the operations for *device* that compute in *dtype*.

    kv_dtype: of the cache; None: *dtype*. attention: ``--attention-backend``; auto is triton, or
    sdpa on cards before sm80. spread: a GPU's quantized weights are kept in both forms.
    widened_bytes: of a GPU for keys and values of e4m3 in 16 bits. Raises ConfigError, naming the
    flag, for what the device cannot. On a CPU there is one kind of attention, and float32 results
    are deterministic as they are.
    """
    if device.type == "cpu":
        return CpuOps(dtype, kv_dtype=kv_dtype)
    from zlm.ops.gpu import GpuOps  # needs Triton, which a CPU's installation may lack

    capability = torch.cuda.get_device_capability(device)
    name = f"this card has compute capability {capability[0]}.{capability[1]}"
    if capability < MATRIX_UNITS and dtype == torch.bfloat16:
        raise ConfigError(f"--dtype bfloat16 needs compute capability 8.0: {name}; use float16")
    if capability < MATRIX_UNITS and attention == "triton":
        raise ConfigError(f"--attention-backend triton needs compute capability 8.0: {name}")
    if capability < MATRIX_UNITS and deterministic:
        raise ConfigError(f"--deterministic needs compute capability 8.0: {name}")
    if attention == "auto":
        attention = "triton" if capability >= MATRIX_UNITS else "sdpa"
    return GpuOps(
        device,
        dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        deterministic=deterministic,
        spread=spread,
        widened_bytes=widened_bytes,
        pdl=capability >= DEPENDENT_LAUNCH,
    )
