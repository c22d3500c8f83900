"""Which device a model will run on, found without torch and without starting the CUDA driver.

The supervisor and the caller of ``LLM`` must stay free of CUDA: a driver that is initialised in a
process is of no use in the processes it forks. So what is looked at is what the driver shows
without being asked: its device nodes, its library, and CUDA_VISIBLE_DEVICES. Whether the card then
works is the worker's to find out.
"""

import ctypes
import importlib.util
import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from zlm.errors import ConfigError

DRIVER_LIBRARY = "libcuda.so.1"
GPU_PACKAGES = "torch with CUDA and triton"

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]


def find_device(wanted: str, ranks: int = 1) -> Device:
    """Return the device for ``--device`` *wanted* (auto, cpu or cuda) on this machine.

    Raises ConfigError for cuda where there is none, and if there are fewer GPUs than *ranks*. auto
    with a GPU that the installed packages cannot use is the CPU, and a warning.
    """
    if wanted == "cpu":
        return "cpu"
    device = choose(wanted, missing_gpu(), missing_package())
    if device == "cuda":
        check_number(ranks, num_gpus())
    return device


def check_number(ranks: int, num_visible: int | None) -> None:
    """Raise ConfigError unless each of *ranks* can have a GPU of its own; None: not known."""
    if num_visible is not None and ranks > num_visible:
        seen = "1 GPU is" if num_visible == 1 else f"{num_visible} GPUs are"
        raise ConfigError(
            f"{ranks} workers (--tensor-parallel-size, --pipeline-parallel-size) need a GPU each, "
            f"and {seen} visible here (CUDA_VISIBLE_DEVICES may hide others)"
        )


def num_gpus(environment: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> int | None:
    """Return how many NVIDIA GPUs this process can see; None if it cannot be known so."""
    if (dev / "dxg").exists():
        return None
    num_nodes = _num_nodes(dev)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_nodes
    entries = [entry.strip() for entry in visible.split(",")]
    seen = itertools.takewhile(lambda entry: _is_visible(entry, num_nodes), entries)
    return len(list(seen))


def _num_nodes(dev: Path) -> int:
    return sum(node.name[6:].isdigit() for node in dev.glob("nvidia[0-9]*"))


def choose(wanted: str, no_gpu: str | None, no_package: str | None) -> Device:
    """Return the device for *wanted*, auto or cuda, given why there is no GPU or no use for it."""
    reason = no_gpu or no_package
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(f"--device cuda: {reason}; give cpu or auto")
    if no_gpu is None:
        logger.warning("there is a GPU, but %s: computing on the CPU", reason)
    return "cpu"


def missing_gpu(
    environment: Mapping[str, str] = os.environ,
    dev: Path = Path("/dev"),
    library: str = DRIVER_LIBRARY,
) -> str | None:
    """Return why this process can see no NVIDIA GPU; None if it can see one."""
    num_nodes = _num_nodes(dev)
    is_wsl = (dev / "dxg").exists()  # Windows' driver has one node for all devices
    if not is_wsl and (num_nodes == 0 or not (dev / "nvidiactl").exists()):
        return f"there is no NVIDIA GPU here (no {dev}/nvidiactl with a {dev}/nvidia0)"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not _is_visible(visible, None if is_wsl else num_nodes):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    try:
        ctypes.CDLL(library)
    except OSError:
        return f"the NVIDIA driver's library {library} is not installed"
    return None


def _is_visible(visible: str, num_devices: int | None) -> bool:
    """Whether the first entry of CUDA_VISIBLE_DEVICES names a device; CUDA stops at a wrong one."""
    first = visible.partition(",")[0].strip()
    if first.isdigit():
        return num_devices is None or int(first) < num_devices
    return first.startswith(("GPU-", "MIG-"))


def missing_package() -> str | None:
    """Return why the installed packages cannot compute on a GPU; None if they can."""
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    if not folders:
        return "torch is not installed"
    if not any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return f"the torch that is installed was built without CUDA ({GPU_PACKAGES} are needed)"
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed ({GPU_PACKAGES} are needed)"
    return None
