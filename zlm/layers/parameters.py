"""Named tensors of a checkpoint as layers take them: in one type, on one device."""

from collections.abc import Callable, Set

import torch
from torch import Tensor


class Parameters:
    """The tensors under one prefix of a checkpoint. Reads them when asked, keeps none."""

    def __init__(
        self,
        read: Callable[[str], Tensor],
        names: Set[str],
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
    ) -> None:
        """*read* gives the tensor of a full name in *names*, in whatever type it is stored in."""
        self.read = read
        self.names = names
        self.dtype = dtype
        self.device = device
        self.prefix = prefix

    def under(self, prefix: str) -> "Parameters":
        """Return the parameters whose names begin with *prefix* and a dot."""
        full = f"{self.prefix}{prefix}."
        return Parameters(self.read, self.names, self.dtype, self.device, full)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor in the compute type."""
        return self.read(self.prefix + name).to(self.device, self.dtype)

    def optional(self, name: str) -> Tensor | None:
        """Return a tensor in the compute type, or None if the model has no such one."""
        return self[name] if self.prefix + name in self.names else None
