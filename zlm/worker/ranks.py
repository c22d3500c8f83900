"""What the ranks of an engine agree on before they meet (``zlm.worker.parallel``). No torch."""

import os
from pathlib import Path

# Read by the libraries when they are loaded; a user's own settings stay.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Multicast over NVLink needs a fabric manager, and virtual machines often lack it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def prepare() -> None:
    """Set what the libraries read when they are loaded; before torch is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def meeting(runtime: Path, incarnation: int) -> Path:
    """Return the file where the ranks of an engine's *incarnation* meet."""
    return runtime / f"ranks.{incarnation}"
