"""Named tensors of a checkpoint as layers take them: in the compute type, on the device.

With them come the operations that a layer makes of them.
"""

from collections.abc import Callable, Set

from torch import Tensor

from zlm.ops.backend import Ops
from zlm.ops.block_matrix import BlockMatrix, Weight


class Parameters:
    """The tensors under one prefix of a checkpoint. Reads them when asked, keeps none."""

    def __init__(
        self,
        read: Callable[[str], Tensor],
        names: Set[str],
        ops: Ops,
        prefix: str = "",
        *,
        read_quantized: Callable[[str], BlockMatrix | None] | None = None,
    ) -> None:
        """*read* gives the tensor of a full name in *names*, in whatever type it is stored in.

        read_quantized gives it as it is quantized, None if it is not; without it, all is read.
        """
        self.read = read
        self.names = names
        self.ops = ops
        self.prefix = prefix
        self.read_quantized = read_quantized

    def under(self, prefix: str) -> "Parameters":
        """Return the parameters whose names begin with *prefix* and a dot."""
        return Parameters(
            self.read,
            self.names,
            self.ops,
            f"{self.prefix}{prefix}.",
            read_quantized=self.read_quantized,
        )

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor in the compute type."""
        return self.read(self.prefix + name).to(self.ops.device, self.ops.dtype)

    def product(self, name: str) -> Weight:
        """Return a weight [N, K] that is multiplied with: quantized, if it is and the ops take it.

        A row must have blocks of its own, and its columns must stand in their order, since rows
        are put in another order, and on top of others'.
        """
        if self.read_quantized is not None:
            matrix = self.read_quantized(self.prefix + name)
            if matrix is not None and matrix.block[0] == 1 and matrix.order is None:
                return matrix
        return self[name]

    def optional(self, name: str) -> Tensor | None:
        """Return a tensor in the compute type, or None if the model has no such one."""
        return self[name] if self.prefix + name in self.names else None
