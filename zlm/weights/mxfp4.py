"""A published gpt-oss checkpoint, whose experts are MXFP4, under the names of a plain one.

``gate_up_proj_blocks`` [E, 2 I, G, 16] and ``gate_up_proj_scales`` [E, 2 I, G] are
``gate_up_proj`` [E, H, 2 I] here, dequantized when it is asked for, and so is ``down_proj``. Parts
are of whole blocks, and no others are read.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zlm.errors import ModelError
from zlm.layers.quantization import mxfp4
from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.region import Choose, Region, whole

if TYPE_CHECKING:
    from zlm.weights.load import FedFolderWeights, FolderWeights

BLOCKS, SCALES = "_blocks", "_scales"
AXES = (0, 2, 1)  # dimensions of blocks and scales, of those of a plain tensor
COLUMNS = 1  # dimension of a plain tensor that blocks are formed along


class MXFP4Weights:
    """See ``zlm.weights.load.Weights``. Owns *stored*."""

    def __init__(self, stored: "FolderWeights | FedFolderWeights") -> None:
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
        return self.part(name, whole)

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return what *choose* names of tensor *name*."""
        if name not in self._packed:
            return self._stored.part(name, choose)
        experts, matrix = self._read(name, choose)
        # It holds them exactly.
        return matrix.dequantize(torch.bfloat16).unflatten(0, (experts, -1)).transpose(1, 2)

    def matrix(self, name: str, choose: Choose = whole) -> BlockMatrix | None:
        """Return what *choose* names of the tensor *name* as it is quantized; None if it is not.

        The experts are on top of each other, each as rows of K: [E N, K] for a plain [E, K, N].
        """
        return self._read(name, choose)[1] if name in self._packed else None

    def _read(self, name: str, choose: Choose) -> tuple[int, BlockMatrix]:
        """Return how many experts there are, and the matrix of their weights *name*."""
        parts, group = (name + BLOCKS, name + SCALES), mxfp4.GROUP
        try:
            experts, rows, columns = mxfp4.shape(*map(self._stored.shape, parts))
        except ValueError as error:
            raise ModelError(f"the parts of the quantized {name} do not agree: {error}") from error
        region, own = choose((experts, columns, rows)), None
        if region is not None:
            unit = group if region.dim == COLUMNS else 1
            ends = [end for bounds in region.ranges for end in bounds]
            assert not any(end % unit for end in (*ends, region.zeros)), "a block is parted"
            spans = tuple((first // unit, last // unit) for first, last in region.ranges)
            own = Region(AXES[region.dim], spans, region.zeros // unit)
        blocks, scales = (self._stored.part(part, lambda _: own) for part in parts)
        return len(blocks), mxfp4.matrix(blocks, scales)

    def close(self) -> None:
        self._stored.close()
