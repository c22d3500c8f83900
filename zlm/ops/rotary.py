"""Rotation of queries and keys by their positions, pairs of dimensions as complex numbers.

zlm keeps the two dimensions of a rotary pair next to each other (the layout of the original Llama
code), not half a head apart as Hugging Face stores them: ``layers.rotary.interleave`` reorders the
rows of the q and k weights at load. Scores do not change, since q and k are reordered alike, and
the rotation of all heads is one complex product in place.
"""

import torch
from torch import Tensor


def rotate(heads: Tensor, rotation: Tensor) -> None:
    """Rotate *heads* [T, heads, D] (may be strided) in place by *rotation* [T, rot / 2].

    *rotation* is complex64, cos + i sin of each token's angles; the first ``rot`` dimensions of a
    head are rotated, the rest stay.
    """
    rows, width = rotation.shape[0], 2 * rotation.shape[1]
    part = heads[:rows, :, :width]
    factor = rotation.unsqueeze(1)
    if part.dtype == torch.float32:
        torch.view_as_complex(part.unflatten(-1, (-1, 2))).mul_(factor)
    else:
        wide = torch.view_as_complex(part.float().unflatten(-1, (-1, 2)))
        part.copy_(torch.view_as_real(wide.mul_(factor)).flatten(-2))
