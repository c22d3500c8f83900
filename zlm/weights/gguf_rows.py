"""Rows of a large GGUF tensor, read from its file when they are wanted.

Of an embedding a step needs a row a token. In memory all of it would be of no use but for the few
rows that a text has: Gemma 3 270M's takes 180 MB, a quarter of what its worker has. The kernel's
page cache keeps what is read often; a row that is in it takes a microsecond or two.
"""

import os

import torch
from torch import Tensor

from zlm.errors import ModelError
from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.gguf import TensorInfo
from zlm.weights.gguf_matrix import PARTS, matrix

LEAST_BYTES = 64 << 20  # of a tensor in the file; a smaller one is better kept in memory


class FileRows:
    """See ``zlm.ops.block_matrix.Rows``. Owns a descriptor of the file."""

    def __init__(self, path: str, info: TensorInfo) -> None:
        rows, self._columns = info.shape
        self._path, self._type, self._offset = path, info.type, info.offset
        self._row_bytes = info.num_bytes // rows
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error

    @staticmethod
    def takes(info: TensorInfo) -> bool:
        """Tell whether the tensor is better read so."""
        return info.type in PARTS and len(info.shape) == 2 and info.num_bytes >= LEAST_BYTES

    def rows(self, index: Tensor) -> BlockMatrix:
        """Return the rows *index*, int64 [M]. Raises ModelError if the file cannot be read."""
        size = self._row_bytes
        raw = torch.empty(len(index) * size, dtype=torch.uint8)
        view = memoryview(raw.numpy().data)
        try:
            counts = [
                os.preadv(self._descriptor, [view[at * size :][:size]], self._offset + row * size)
                for at, row in enumerate(index.tolist())
            ]
        except OSError as error:
            raise ModelError(f"cannot read {self._path}: {error.strerror or error}") from error
        if any(count < size for count in counts):
            raise ModelError(f"{self._path} has been cut short while it was in use")
        return matrix(raw, self._type, (len(index), self._columns))

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
