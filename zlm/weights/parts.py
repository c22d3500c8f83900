"""Reading a part of a tensor, or of a quantized weight with the scales and offsets it needs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.region import Choose, Region


class WholeWeights(Protocol):
    """A checkpoint as far as it is needed here."""

    def get(self, name: str) -> Tensor: ...


@runtime_checkable
class PartWeights(Protocol):
    """A checkpoint that reads no more of a tensor than is wanted."""

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return the region of tensor *name* that *choose* names when told its shape."""


def read_tensor(weights: WholeWeights, name: str, choose: Choose) -> Tensor:
    """Return of tensor *name* what *choose* says, read alone if the checkpoint can do that."""
    if isinstance(weights, PartWeights):
        return weights.part(name, choose)
    return chosen(weights.get(name), choose)


def chosen(tensor: Tensor, choose: Choose) -> Tensor:
    """Return of *tensor* what *choose* says."""
    region = choose(tensor.shape)
    return tensor if region is None else read_part(tensor, region)


def read_part(stored: Any, region: Region) -> Tensor:
    """Return *region* of *stored*: a tensor, or a safetensors slice, which is read no further."""
    lead = (slice(None),) * region.dim
    parts = [stored[(*lead, slice(*bounds))] for bounds in region.ranges]
    if region.zeros:
        like = parts[0] if parts else stored[(slice(0, 0),)]
        shape = list(like.shape) if parts else list(_shape(stored))
        shape[region.dim] = region.zeros
        parts.append(like.new_zeros(shape))
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, region.dim)


def _shape(stored: Any) -> Sequence[int]:
    shape: Sequence[int] = (
        stored.shape if isinstance(stored, Tensor | BlockMatrix) else stored.get_shape()
    )
    return shape


def chosen_matrix(matrix: BlockMatrix, choose: Choose) -> BlockMatrix | None:
    """Return of *matrix* what *choose* says; None if that cannot be cut out of it."""
    region = choose(matrix.shape)
    return matrix if region is None else part_of_matrix(matrix, region)


def part_of_matrix(matrix: BlockMatrix, region: Region) -> BlockMatrix | None:
    """Return *region* of a quantized weight; None if its columns are not in their order."""
    dim, ranges = region.dim, region.ranges
    if dim == 1 and matrix.order is not None:
        return None
    codes = read_part(matrix.codes, region)
    edge, edges = matrix.block[dim], list(matrix.block)
    if edge >= matrix.shape[dim] and not region.zeros:  # one block, whatever is taken of it
        edges[dim] = codes.shape[dim]
        places = torch.zeros(1, dtype=torch.int64)
    else:
        # Each new block is to lie in one block of the whole, and in one range.
        ends = [b - a for a, b in (ranges if region.zeros else ranges[:-1])]
        edges[dim] = new = math.gcd(edge, *(a for a, _ in ranges), *ends)
        places = torch.cat([torch.arange(a, b, new) for a, b in ranges]) // edge
    padding = -(-region.zeros // edges[dim])
    scales, offsets = _blocks(matrix.scales, dim, places, padding), None
    if matrix.offsets is not None:
        offsets = _blocks(matrix.offsets, dim, places, padding)
    return replace(matrix, codes=codes, scales=scales, offsets=offsets, block=(edges[0], edges[1]))


def _blocks(values: Tensor, dim: int, places: Tensor, padding: int) -> Tensor:
    """Return the blocks at *places* along *dim*, and *padding* of zeros."""
    kept = values.index_select(dim, places.to(values.device))
    return read_part(kept, Region(dim, ((0, len(places)),), padding))
