"""Buckets of steps, and the array that tells the device of a step."""

import numpy as np
import pytest
import torch
from worker_steps import execute

from zlm.worker import gpu_steps, step_inputs
from zlm.worker.gpu_steps import StepSizes

DUMMY = 300


def test_decode_buckets_grow_by_a_share_of_their_size() -> None:
    buckets = StepSizes(256).decode_buckets
    assert buckets[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and buckets[-2:] == [240, 256]
    assert all(b % 8 == 0 for b in buckets[3:])
    assert StepSizes(1).decode_buckets == [1]
    assert StepSizes(100).decode_buckets[-1] == 100
    for rows in range(1, 257):
        size = StepSizes(256).decodes(rows).decodes
        assert rows <= size <= max(2 * rows, rows + 15)


@pytest.mark.parametrize("max_num_seqs", [1, 5, 64, 256, 1000])
def test_no_step_exceeds_its_shape_or_the_largest(max_num_seqs: int) -> None:
    sizes, budget = StepSizes(max_num_seqs), 8192
    largest = sizes.largest(budget)
    random = np.random.default_rng(0)
    for _ in range(300):
        rows = int(random.integers(1, max_num_seqs + 1))
        decodes = int(random.integers(0, rows))
        prefills = rows - decodes
        tokens = int(random.integers(2 * prefills, max(budget - decodes, 2 * prefills + 1)))
        samples = int(random.integers(0, rows + 1))
        shape = sizes.mixed(decodes, prefills, tokens, samples)
        assert shape.decodes >= decodes and shape.prefill_rows >= prefills
        assert shape.prefill_tokens >= tokens and shape.samples >= samples
        parts = (shape.decodes, shape.prefill_rows, shape.prefill_tokens, shape.samples)
        assert all(part % 16 == 0 for part in parts)
        assert shape.decodes <= largest.decodes and shape.prefill_rows <= largest.prefill_rows
        assert shape.samples <= sizes.max_samples
        assert gpu_steps.length(shape) <= gpu_steps.length(largest)


def test_graphs_of_mixed_steps_are_few() -> None:
    """One prompt beside at most 64 running sequences: a hundred shapes or so."""
    sizes, shapes = StepSizes(64), set()
    for decodes in range(64):
        for tokens in range(2, 8192 - decodes, 5):
            shape = sizes.mixed(decodes, 1, tokens, decodes + 1)
            assert shape.prefill_tokens <= max(64, tokens + tokens // 8, -(-tokens // 64) * 64)
            shapes.add(shape)
    assert len(shapes) <= 160


def read(rows):
    return step_inputs.read(execute(1, rows))


def test_array_of_a_decode_step() -> None:
    rows = read([(7, 30, 1, 1), (3, 12, 1, 0), (9, 2, 1, 1)])
    shape = StepSizes(64).shape(rows)
    array, chosen = gpu_steps.fill(rows, shape, DUMMY)
    inputs = gpu_steps.views(torch.from_numpy(array), shape)
    assert shape.decodes == 4 and chosen.tolist() == [0, 2]
    assert inputs.slots.tolist() == [7, 3, 9, DUMMY, DUMMY]
    assert inputs.starts.tolist() == [30, 12, 2, 0, 0]
    assert inputs.query_starts.tolist() == [0, 1, 2, 3, 4, 4]
    assert inputs.sample_slots.tolist() == [7, DUMMY, 9, DUMMY]
    assert inputs.sample_lengths.tolist() == [31, 0, 3, 0]
    assert all(view.data_ptr() % 16 == inputs.slots.data_ptr() % 16 for view in _all(inputs))


def test_array_of_a_mixed_step() -> None:
    """Prefill rows come after the decodes' bucket; samples stand in message order."""
    rows = read([(5, 0, 40, 1), (7, 30, 1, 1), (6, 16, 3, 0), (3, 12, 1, 1)])
    shape = StepSizes(64).shape(rows)
    array, chosen = gpu_steps.fill(rows, shape, DUMMY)
    inputs = gpu_steps.views(torch.from_numpy(array), shape)
    assert (shape.decodes, shape.prefill_tokens, shape.prefill_rows) == (16, 64, 16)
    assert inputs.slots.tolist() == [7, 3] + [DUMMY] * 14 + [5, 6] + [DUMMY] * 15
    assert inputs.starts.tolist() == [30, 12] + [0] * 14 + [0, 16] + [0] * 15
    ends = [16, 56, 59]
    assert inputs.query_starts.tolist() == [*range(16), *ends] + [59] * 14 + [80]
    assert chosen.tolist() == [0, 1, 2]
    assert inputs.sample_slots.tolist()[:4] == [5, 7, 3, DUMMY]
    assert inputs.sample_lengths.tolist()[:3] == [40, 31, 13]
    assert inputs.sample_tokens.tolist()[:3] == [55, 0, 1]


def _all(inputs):
    return [getattr(inputs, name) for name in inputs.__dataclass_fields__]


def test_array_of_padding_alone() -> None:
    sizes = StepSizes(64)
    for shape in (sizes.decodes(4), sizes.mixed(16, 1, 64, 17), sizes.mixed(0, 2, 200, 2)):
        inputs = gpu_steps.views(torch.from_numpy(gpu_steps.blank(shape, DUMMY)), shape)
        assert set(inputs.slots.tolist()) == {DUMMY} and not inputs.starts.any()
        assert set(inputs.sample_slots.tolist()) == {DUMMY} and not inputs.sample_lengths.any()
        counts = inputs.query_starts.diff().tolist()
        assert counts[: shape.decodes] == [1] * shape.decodes
        assert not any(counts[shape.decodes : -1]) and counts[-1] == shape.prefill_tokens


def test_common_shapes_are_steps_within_the_budget() -> None:
    shapes = StepSizes(64).common(2048)
    assert len(shapes) == len(set(shapes)) and 20 < len(shapes) < 60
    assert max(shape.prefill_tokens for shape in shapes) == 2048
    assert StepSizes(64).mixed(13, 1, 250, 14) in shapes
