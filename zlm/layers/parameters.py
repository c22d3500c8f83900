"""Named tensors of a checkpoint as layers take them: in the compute type, on the device.

With them come the operations that a layer makes of them.
"""

from collections.abc import Callable, Set

from torch import Tensor

from zlm.ops.backend import Ops


class Parameters:
    """The tensors under one prefix of a checkpoint. Reads them when asked, keeps none."""

    def __init__(
        self, read: Callable[[str], Tensor], names: Set[str], ops: Ops, prefix: str = ""
    ) -> None:
        """*read* gives the tensor of a full name in *names*, in whatever type it is stored in."""
        self.read = read
        self.names = names
        self.ops = ops
        self.prefix = prefix

    def under(self, prefix: str) -> "Parameters":
        """Return the parameters whose names begin with *prefix* and a dot."""
        return Parameters(self.read, self.names, self.ops, f"{self.prefix}{prefix}.")

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor in the compute type."""
        return self.read(self.prefix + name).to(self.ops.device, self.ops.dtype)

    def optional(self, name: str) -> Tensor | None:
        """Return a tensor in the compute type, or None if the model has no such one."""
        return self[name] if self.prefix + name in self.names else None
