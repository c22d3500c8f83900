"""What a GPU says of itself: its memory for the plan, its compute type, who else is on it.

The measuring side of ``zlm.worker.gpu_memory``, which does the arithmetic.
"""

import logging
import subprocess

import torch

from zlm.config import DTYPE_SPELLINGS, ModelSpec, check_kv_dtype
from zlm.errors import ConfigError
from zlm.worker.gpu_costs import Card
from zlm.worker.gpu_memory import Measured

log = logging.getLogger("zlm.worker")

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BFLOAT16_CAPABILITY = (8, 0)
LIST_SECONDS = 5.0  # how long nvidia-smi may take to list processes


def open_device(rank: int = 0) -> torch.device:
    """Start CUDA on visible GPU number *rank*, the current one from then on, and return it.

    Raises ConfigError, in CUDA's words, if that fails.
    """
    device = torch.device("cuda", rank)
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # makes the context
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"the GPU cannot be used: {reason}. Give --device cpu to compute without it"
        ) from error
    return device


def card(device: torch.device) -> Card:
    """Return *device* as it is now, for the plan: call it before the first tensor is made."""
    free, total = torch.cuda.mem_get_info(device)
    facts = torch.cuda.get_device_properties(device)
    holders = _holders() if free < 0.9 * total else ""
    capability = (facts.major, facts.minor)
    return Card(facts.name, total, free, facts.multi_processor_count, holders, capability)


def measured(device: torch.device) -> Measured:
    """Return what has been taken of *device* since the peak was last reset."""
    torch.cuda.synchronize(device)
    reserved = torch.cuda.max_memory_reserved(device)
    return Measured(reserved, torch.cuda.mem_get_info(device)[0])


def compute_dtype(
    wanted: str, kv_wanted: str, spec: ModelSpec, capability: tuple[int, int]
) -> torch.dtype:
    """Return the compute type for ``--dtype`` *wanted* on a GPU of *capability*.

    auto is the checkpoint's type in 16 bits: bfloat16, or float16 where the checkpoint or the card
    has no bfloat16; float32 checkpoints are served in 16 bits as well. Raises ConfigError for a
    type that the card lacks and for another type of the KV cache.
    """
    has_bfloat16 = capability >= BFLOAT16_CAPABILITY
    stored = spec.checkpoint_dtype
    name = DTYPE_SPELLINGS.get(wanted, wanted)
    if name == "auto":
        name = "bfloat16" if has_bfloat16 and stored != "float16" else "float16"
        level = logging.WARNING if stored == "bfloat16" and name == "float16" else logging.INFO
        log.log(level, "%s", _auto_reason(name, stored, spec.weights_format, capability))
    elif name == "bfloat16" and not has_bfloat16:
        raise ConfigError(
            f"--dtype {wanted}: this GPU (compute capability {capability[0]}.{capability[1]}) has "
            "no bfloat16, which begins with 8.0: give float16, float32 or auto"
        )
    else:
        log.info("compute type %s, as --dtype says", name)
    check_kv_dtype(name, kv_wanted)
    return TYPES[name]


def _auto_reason(name: str, stored: str, form: str, capability: tuple[int, int]) -> str:
    has = f"the checkpoint's is {stored}" if form != "gguf" else "the checkpoint is quantized"
    if name == stored and form != "gguf":
        return f"compute type {name}, the checkpoint's"
    if capability < BFLOAT16_CAPABILITY and stored != "float16":
        return (
            f"compute type float16: {has}, but this GPU (compute capability {capability[0]}."
            f"{capability[1]}) has no bfloat16"
        )
    return f"compute type {name}: {has}; --dtype float32 is exact and slower"


def _holders() -> str:
    """Return the processes on the GPUs with the memory they hold, as nvidia-smi lists them."""
    fields = "pid,process_name,used_memory"
    command = ["nvidia-smi", f"--query-compute-apps={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIST_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # not installed, or not allowed here: the numbers must do
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return "; ".join(f"process {line}" for line in lines[:5])
