"""A checkpoint that counts what is read of it."""

import torch

from zlm.weights.load import FolderWeights
from zlm.weights.region import Choose


class Counting(FolderWeights):
    """Counts the bytes that are read."""

    read = 0

    def get(self, name: str) -> torch.Tensor:
        tensor = super().get(name)
        self.read += tensor.nbytes
        return tensor

    def part(self, name: str, choose: Choose) -> torch.Tensor:
        before = self.read
        tensor = super().part(name, choose)
        self.read = before + tensor.nbytes  # all of it came by ``get``, if it did
        region = choose(self.shape(name))
        if region is not None:  # zeros are in no file
            self.read -= tensor.nbytes // tensor.shape[region.dim] * region.zeros
        return tensor
