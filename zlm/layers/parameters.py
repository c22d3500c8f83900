"""Named tensors of a checkpoint as layers take them: in the compute type, on the device.

With them come the operations that a layer makes of them.
"""

from collections.abc import Callable, Set

import torch
from torch import Tensor

from zlm.errors import ModelError
from zlm.ops.backend import Ops
from zlm.ops.block_matrix import BlockMatrix, Rows, Weight
from zlm.ops.parallel import ALONE, Parallel


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
        read_rows: Callable[[str], Rows | None] | None = None,
        parallel: Parallel = ALONE,
    ) -> None:
        """*read* gives the tensor of a full name in *names*, in whatever type it is stored in.

        read_quantized gives it as it is quantized, None if it is not; without it, all is read.
        read_rows gives what reads single rows of it from its file, None if nothing does.
        parallel: of the ranks, of each of which *read* gives its own part.
        """
        self.read = read
        self.names = names
        self.ops = ops
        self.prefix = prefix
        self.read_quantized = read_quantized
        self.read_rows = read_rows
        self.parallel = parallel

    def under(self, prefix: str) -> "Parameters":
        """Return the parameters whose names begin with *prefix* and a dot."""
        return Parameters(
            self.read,
            self.names,
            self.ops,
            f"{self.prefix}{prefix}.",
            read_quantized=self.read_quantized,
            read_rows=self.read_rows,
            parallel=self.parallel,
        )

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor in the compute type."""
        return self.read(self.prefix + name).to(self.ops.device, self.ops.dtype)

    def quantized(self, name: str) -> BlockMatrix | None:
        """Return a weight as it is quantized, if it is and the ops take it."""
        return None if self.read_quantized is None else self.read_quantized(self.prefix + name)

    def product(self, name: str) -> Weight:
        """Return a weight [N, K] that is multiplied with: quantized, if it is and the ops take it.

        A row has blocks of its own, since rows are put in another order, and on top of others'.
        """
        matrix = self.quantized(name)
        return self[name] if matrix is None else matrix.by_rows()

    def rows(self, name: str, weight: Weight) -> Weight | Rows:
        """Return *weight*, the tensor *name*, for looking up its rows: from its file, if it can."""
        found = None if self.read_rows is None else self.read_rows(self.prefix + name)
        return weight if found is None else found

    def cache_scales(self, num_kv_heads: int) -> Tensor | None:
        """Return those of e4m3 keys and values, float32 [2, Hkv]; None if none are needed."""
        names = [self.prefix + name for name in ("k_scale", "v_scale")]
        if self.ops.kv_dtype.itemsize > 1 or not any(name in self.names for name in names):
            return None
        rows = []
        for name in names:
            scale = self.read(name).float() if name in self.names else torch.ones(1)
            if scale.numel() not in (1, num_kv_heads) or not bool((scale > 0).all()):
                raise ModelError(
                    f"tensor {name} must be one positive number, or one for each of {num_kv_heads} "
                    f"KV heads, got {scale.numel()} with {scale.min():g} the least"
                )
            rows.append(scale.to(self.ops.device).expand(num_kv_heads))
        return torch.stack(rows)

    def optional(self, name: str) -> Tensor | None:
        """Return a tensor in the compute type, or None if the model has no such one."""
        return self[name] if self.prefix + name in self.names else None
