"""A part of a tensor: what one of several ranks keeps of it. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Range = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class Region:
    """Entries ``ranges`` of dimension ``dim``, one after another, then ``zeros`` more of zeros."""

    dim: int
    ranges: tuple[Range, ...]
    zeros: int = 0


# The region that is wanted of a tensor of some shape; None: all of it. May raise ModelError.
Choose = Callable[[Sequence[int]], Region | None]


def whole(shape: Sequence[int]) -> Region | None:
    """Choose all of a tensor."""
    return None
