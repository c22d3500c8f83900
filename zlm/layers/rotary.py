"""Rotary position embedding: frequencies of every scaling, their table, and the order of pairs.

The table holds cos + i sin for each position up to the server's context length, times the factor
that some scalings put on attention. longrope has two lists of frequencies, and a key rotated with
one must never meet a query rotated with the other: one list serves for the server's life, chosen by
its context length.
"""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from zlm.config import ModelSpec, RopeSpec

log = logging.getLogger(__name__)

# Gemma 4's full layers: pairs are those of a whole head, and the first of them turn, with the
# frequencies that they would have if all did.
PROPORTIONAL = "proportional"
TEMPERATURE = "temperature"  # of Llama 4's layers that turn nothing
STILL = RopeSpec(partial_factor=0.0)  # of others'


def layer_ropes(spec: ModelSpec) -> list[RopeSpec]:
    """Return the rotary embedding of each layer of *spec*; equal ones may share a table."""
    windows = spec.layer_windows or (0,) * spec.num_layers
    turns = spec.rope_layers or (True,) * spec.num_layers
    sliding = spec.rope_sliding or spec.rope
    return [
        (sliding if window else spec.rope) if turned else spec.rope_still or STILL
        for window, turned in zip(windows, turns, strict=True)
    ]


def rotary_table(
    rope: RopeSpec, head_dim: int, max_model_len: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return complex64 [max_model_len, head_dim / 2] for positions 0 .. max_model_len - 1.

    Dimensions of a head that do not turn have the entry 1. Of a temperature it is float32, the same
    number for all of a position's, and for queries alone.
    """
    if rope.scaling == TEMPERATURE:
        steps = (torch.arange(max_model_len) + 1) // rope.original_max_position
        values = torch.log1p(steps.float()) * rope.factor + 1.0
        return values.to(device)[:, None].expand(-1, head_dim // 2)
    rotated = int(head_dim * rope.partial_factor)
    if rope.scaling == PROPORTIONAL:
        frequencies, factor = _plain_frequencies(rope, rotated, head_dim) / rope.factor, 1.0
    else:
        frequencies, factor = _SCALINGS[rope.scaling](rope, rotated, max_model_len)
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    table = torch.ones((max_model_len, head_dim // 2), dtype=torch.complex64)
    table[:, : rotated // 2] = torch.polar(torch.full_like(angles, factor), angles)
    return table.to(device)


def interleave(tensor: Tensor, head_dim: int, rope: RopeSpec) -> Tensor:
    """Put the two dimensions of each rotary pair side by side, in every head.

    tensor [heads * head_dim, ...] has a pair half of the rotated dimensions apart (Hugging Face's
    order, unless *rope* says otherwise); see ``zlm.ops.cpu_rotary`` for why.
    """
    if rope.neighbours:
        return tensor
    rotated = int(head_dim * rope.partial_factor)
    if rope.scaling == PROPORTIONAL:
        rotated = head_dim
    heads = tensor.unflatten(0, (-1, head_dim))
    halves = heads[:, :rotated].unflatten(1, (2, rotated // 2))
    pairs = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, heads[:, rotated:]), 1).flatten(0, 1)


def _plain_frequencies(rope: RopeSpec, rotated: int, size: int = 0) -> Tensor:
    """Return the frequencies of *rotated* / 2 pairs, of *size* / 2 (0: as many) that span all."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / (size or rotated or 1)
    return 1.0 / (rope.theta**exponents)


def _none(rope: RopeSpec, rotated: int, max_model_len: int) -> tuple[Tensor, float]:
    return _plain_frequencies(rope, rotated), 1.0


def _linear(rope: RopeSpec, rotated: int, max_model_len: int) -> tuple[Tensor, float]:
    return _plain_frequencies(rope, rotated) / rope.factor, 1.0


def _llama3(rope: RopeSpec, rotated: int, max_model_len: int) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, between them blended."""
    plain = _plain_frequencies(rope, rotated)
    turns = rope.original_max_position * plain / (2 * math.pi)  # in the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain, 1.0


def _yarn(rope: RopeSpec, rotated: int, max_model_len: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions between interpolated and plain."""
    plain = _plain_frequencies(rope, rotated)

    def dimension(turns: float) -> float:
        """The dimension that makes so many turns in the original context."""
        length = rope.original_max_position / (turns * 2 * math.pi)
        return rotated * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope(rope: RopeSpec, rotated: int, max_model_len: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): a divisor for each frequency, from one of two lists."""
    use_long = max_model_len > rope.original_max_position
    if rope.short_factor != rope.long_factor:
        log.info(
            "longrope: the %s factors serve every sequence (context length %d, original %d)",
            "long" if use_long else "short",
            max_model_len,
            rope.original_max_position,
        )
    divisors = torch.tensor(rope.long_factor if use_long else rope.short_factor)
    factor = rope.attention_factor
    if factor is None:
        factor = 1.0
        if rope.factor > 1.0:
            factor = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    return _plain_frequencies(rope, rotated) / divisors, factor


_SCALINGS: dict[str, Callable[[RopeSpec, int, int], tuple[Tensor, float]]] = {
    "none": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
