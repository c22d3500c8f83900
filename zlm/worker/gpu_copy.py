"""Copies between host and device that the host does not wait for.

Both ends go through pinned memory, which torch's host allocator keeps and gives out again once the
copies that use it have ended. On the CPU (where tests interpret the kernels) they are plain copies.
"""

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Return *values* on *device*. The array may be changed at once."""
    return staged(values).to(device, non_blocking=True)


def upload_into(values: np.ndarray, target: Tensor) -> None:
    """Copy *values* over *target*, of the same shape and type, in the order of the stream."""
    target.copy_(staged(values), non_blocking=True)


def staged(values: np.ndarray) -> Tensor:
    """Return a copy of *values* in host memory that a device can read."""
    pinned = torch.cuda.is_available()
    host = torch.empty(values.shape, dtype=_TYPES[values.dtype.str[1:]], pin_memory=pinned)
    host.numpy()[...] = values
    return host


def download(values: Tensor) -> Tensor:
    """Begin to copy *values* to host memory; the result is there when the stream has got so far."""
    if values.device.type == "cpu":
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


_TYPES = {
    "i8": torch.int64,
    "i4": torch.int32,
    "u1": torch.uint8,
    "f4": torch.float32,
}


class Downloads:
    """Host buffers for what every step brings back, used again when its result has been read."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Buffers hold up to *size* bytes."""
        self._size = size
        self._pinned = device.type == "cuda"
        self._free: list[Tensor] = []

    def begin(self, values: Tensor) -> Tensor:
        """Begin to copy *values*, uint8, to the start of a buffer: valid until ``give_back``."""
        buffer = self._free.pop() if self._free else self._new()
        buffer[: len(values)].copy_(values, non_blocking=True)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Let a buffer be used again."""
        self._free.append(buffer)

    def _new(self) -> Tensor:
        return torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned)
