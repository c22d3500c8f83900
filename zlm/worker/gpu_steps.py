"""The form of a step on the GPU: buckets of its size, and its rows as one array of integers.

A CUDA graph is made for one size, so sizes are rounded up to buckets and the rest is padding. A
step has a part of *decodes* (rows of one token) and a part of *prefill* rows:

    rows     | decodes, then padding | prefill rows, then padding | one tail row |
    tokens   | one a row             | theirs                     | padding      |

Padding rows have the dummy slot: among the decodes they compute its token 0, among prefill rows
they have no token, and the tail row has whatever tokens are left up to the bucket. All that the
device is told is one int32 array, ``[slots | starts | query_starts | samples...]``, copied in one
go. Knows nothing of models, graphs or memory.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from zlm.worker.step_inputs import StepRows

ALIGNMENT = 4  # integers: views of 16 bytes, as kernels were compiled for
MIXED_DECODES = (0, 16, 32, 64, 128, 192, 256)  # then every 64
COMMON_TOKENS = (4096, 2048, 1024, 512, 256, 128, 64)
FEW, MANY = 16, 64  # prefill rows, and those of them that sample; then all that a step can have


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's buckets. Without prefill every decode row has a sample, in its place."""

    decodes: int
    prefill_tokens: int = 0
    prefill_rows: int = 0
    samples: int = 0

    @property
    def num_rows(self) -> int:
        """Rows without the tail row."""
        return self.decodes + self.prefill_rows

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    def holds(self, other: "StepShape") -> bool:
        """Tell whether a step of *other*, with prefill, can be run in this shape."""
        rows = self.decodes >= other.decodes and self.prefill_rows >= other.prefill_rows > 0
        return (
            rows and self.prefill_tokens >= other.prefill_tokens and self.samples >= other.samples
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the device's copy of a step's array, all int32."""

    slots: Tensor  # [R + 1]
    starts: Tensor  # [R + 1]
    query_starts: Tensor  # [R + 2]
    sample_slots: Tensor  # [S]
    sample_lengths: Tensor  # [S]: the position of the sampled token
    sample_tokens: Tensor  # [S]: index among the step's tokens


class StepSizes:
    """The buckets of a server with *max_num_seqs* running sequences."""

    def __init__(self, max_num_seqs: int) -> None:
        self.decode_buckets = _decode_buckets(max_num_seqs)
        self.mixed_decodes = (*MIXED_DECODES, *range(320, max_num_seqs + 64, 64))
        self.max_samples = _up(max_num_seqs, 16)
        self.max_decodes = next(size for size in self.mixed_decodes if size >= max_num_seqs)

    def shape(self, rows: StepRows) -> StepShape:
        """Return the shape that the step *rows* is rounded up to."""
        if rows.num_decodes == len(rows.slots):
            return self.decodes(rows.num_decodes)
        return self.mixed(
            rows.num_decodes,
            len(rows.slots) - rows.num_decodes,
            len(rows.positions) - rows.num_decodes,
            len(rows.sampled_slots),
        )

    def decodes(self, rows: int) -> StepShape:
        """Return the shape of a step of *rows* decodes."""
        size = next(bucket for bucket in self.decode_buckets if bucket >= rows)
        return StepShape(decodes=size, samples=size)

    def mixed(self, decodes: int, prefill_rows: int, tokens: int, samples: int) -> StepShape:
        """Return the shape of a step with *prefill_rows* rows of *tokens* tokens in all.

        All sizes are multiples of 16, as kernels were compiled for.
        """
        first = next(size for size in self.mixed_decodes if size >= decodes)
        rows = _class(prefill_rows, _up(prefill_rows, 256))
        wanted = first + _class(samples - decodes, rows) if samples else 0
        return StepShape(first, _prefill_bucket(tokens), rows, min(wanted, self.max_samples))

    def common(self, max_num_batched_tokens: int) -> list[StepShape]:
        """Return the shapes of one prompt, of usual lengths, beside decodes; largest first."""
        lengths = [n for n in COMMON_TOKENS if n < max_num_batched_tokens]
        return [
            self.mixed(decodes, 1, tokens, decodes + 1)
            for tokens in (max_num_batched_tokens, *lengths)
            for decodes in reversed(self.mixed_decodes)
            if decodes <= self.max_decodes
        ]

    def largest(self, max_num_batched_tokens: int) -> StepShape:
        """Return a shape that no step exceeds in any size."""
        most, tokens = self.max_decodes, _prefill_bucket(max_num_batched_tokens)
        return StepShape(most, tokens, _class(most, _up(most, 256)), self.max_samples)


def _decode_buckets(most: int) -> list[int]:
    buckets, size = [], 1
    while size < most:
        buckets.append(size)
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 64
    return [*buckets, most]


def _prefill_bucket(tokens: int) -> int:
    """Round up by at most an eighth, and to 64 tokens."""
    return _up(tokens, 64 if tokens <= 512 else 1 << (tokens.bit_length() - 4))


def _class(count: int, most: int) -> int:
    return FEW if count <= FEW else MANY if count <= MANY else most


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def length(shape: StepShape) -> int:
    """Return the integers of a step's array."""
    return _offsets(shape)[-1]


def _offsets(shape: StepShape) -> list[int]:
    rows = shape.num_rows
    sizes = (rows + 1, rows + 1, rows + 2, shape.samples, shape.samples, shape.samples)
    offsets = [0]
    for size in sizes:
        offsets.append(_up(offsets[-1] + size, ALIGNMENT))
    return offsets


def views(array: Tensor, shape: StepShape) -> StepInputs:
    """Return the parts of *array*, int32 of at least ``length(shape)``."""
    rows, samples = shape.num_rows, shape.samples
    sizes = (rows + 1, rows + 1, rows + 2, samples, samples, samples)
    parts = (array[at : at + n] for at, n in zip(_offsets(shape), sizes, strict=False))
    return StepInputs(*parts)


def fill(rows: StepRows, shape: StepShape, dummy_slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a step's array, int32, and which samples of it the step asks for, in message order."""
    array = np.zeros(length(shape), np.int32)
    at = _offsets(shape)
    num_rows, decodes, first = shape.num_rows, rows.num_decodes, shape.decodes
    slots = array[at[0] : at[0] + num_rows + 1]
    slots.fill(dummy_slot)
    starts = array[at[1] : at[1] + num_rows + 1]
    query_starts = array[at[2] : at[2] + num_rows + 2]
    prefills = len(rows.slots) - decodes
    slots[:decodes] = rows.slots[:decodes]
    starts[:decodes] = rows.starts[:decodes]
    query_starts[: first + 1] = np.arange(first + 1)
    if prefills or shape.prefill_rows:
        slots[first : first + prefills] = rows.slots[decodes:]
        starts[first : first + prefills] = rows.starts[decodes:]
        ends = first + rows.offsets[decodes + 1 :] - decodes
        query_starts[first + 1 : first + 1 + prefills] = ends
        query_starts[first + 1 + prefills : -1] = ends[-1] if prefills else first
    query_starts[-1] = shape.num_tokens
    chosen = _fill_samples(rows, shape, array, at, dummy_slot)
    return array, chosen


def _fill_samples(
    rows: StepRows, shape: StepShape, array: np.ndarray, at: list[int], dummy_slot: int
) -> np.ndarray:
    sample_slots, lengths, tokens = (array[at[i] : at[i] + shape.samples] for i in (3, 4, 5))
    sample_slots.fill(dummy_slot)
    count = len(rows.sampled_slots)
    # Without prefill samples stand in their rows, else one after another.
    chosen = np.arange(count) if shape.prefill_rows else rows.sampled_tokens
    sample_slots[chosen] = rows.sampled_slots
    lengths[chosen] = rows.sampled_lengths
    tokens[chosen] = padded_index(rows, shape, rows.sampled_tokens)
    return chosen


def blank(shape: StepShape, dummy_slot: int) -> np.ndarray:
    """Return the array of a step of padding alone."""
    array = np.zeros(length(shape), np.int32)
    at, rows = _offsets(shape), shape.num_rows
    array[at[0] : at[0] + rows + 1] = dummy_slot
    query_starts = array[at[2] : at[2] + rows + 2]
    query_starts[: shape.decodes + 1] = np.arange(shape.decodes + 1)
    query_starts[shape.decodes + 1 : -1] = shape.decodes
    query_starts[-1] = shape.num_tokens
    array[at[3] : at[3] + shape.samples] = dummy_slot
    return array


def padded_index(rows: StepRows, shape: StepShape, tokens: np.ndarray) -> np.ndarray:
    """Return where tokens of the step (indices without padding) stand with padding."""
    return np.where(tokens < rows.num_decodes, tokens, tokens + shape.decodes - rows.num_decodes)
