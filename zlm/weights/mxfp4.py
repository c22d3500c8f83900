"""A published gpt-oss checkpoint, whose experts are MXFP4, under the names of a plain one.

``gate_up_proj_blocks`` [E, 2 I, G, 16] and ``gate_up_proj_scales`` [E, 2 I, G] are
``gate_up_proj`` [E, H, 2 I] here, dequantized when it is asked for, and so is ``down_proj``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from zlm.errors import ModelError
from zlm.layers.quantization import mxfp4
from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.parts import chosen, chosen_matrix, read_tensor
from zlm.weights.region import Choose, whole

if TYPE_CHECKING:
    from zlm.weights.load import Weights

T = TypeVar("T")
BLOCKS, SCALES = "_blocks", "_scales"


class MXFP4Weights:
    """See ``zlm.weights.load.Weights``. Owns *stored*."""

    def __init__(self, stored: "Weights") -> None:
        self._stored = stored
        present = set(stored.names())
        self._packed = {  # our names of what is stored in two parts
            name.removesuffix(BLOCKS)
            for name in present
            if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in present
        }

    def names(self) -> list[str]:
        parts = {name + part for name in self._packed for part in (BLOCKS, SCALES)}
        return [*(name for name in self._stored.names() if name not in parts), *self._packed]

    def get(self, name: str) -> Tensor:
        if name not in self._packed:
            return self._stored.get(name)
        return self._read(name, mxfp4.dequantize).transpose(1, 2)

    def matrix(self, name: str, choose: Choose = whole) -> BlockMatrix | None:
        """Return the weights *name* of all experts as they are quantized; None if they are not."""
        if name not in self._packed:
            return None
        return chosen_matrix(self._read(name, mxfp4.matrix), choose)

    def _read(self, name: str, make: Callable[[Tensor, Tensor], T]) -> T:
        """Return what *make* makes of blocks and scales of *name*."""
        blocks, scales = (self._stored.get(name + part) for part in (BLOCKS, SCALES))
        try:
            return make(blocks, scales)
        except ValueError as error:
            raise ModelError(f"the parts of the quantized {name} do not agree: {error}") from error

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return what *choose* names of tensor *name*: of one that is not quantized, no more."""
        if name not in self._packed:
            return read_tensor(self._stored, name, choose)
        return chosen(self.get(name), choose)

    def close(self) -> None:
        self._stored.close()
