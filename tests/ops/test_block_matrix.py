"""Quantized matrices: what their blocks mean, and how rows of several come together."""

from dataclasses import replace

import pytest
import torch

from zlm.ops import block_matrix
from zlm.ops.block_matrix import BlockMatrix, stack, take_rows, unpack


def random_matrix(rows: int = 6, columns: int = 16, block: tuple[int, int] = (1, 4)) -> BlockMatrix:
    shape = -(-rows // block[0]), -(-columns // block[1])
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    return BlockMatrix(codes, torch.rand(shape), torch.rand(shape), block)


def by_hand(matrix: BlockMatrix) -> torch.Tensor:
    rows, columns = matrix.shape
    out = torch.empty(rows, columns)
    for n in range(rows):
        for k in range(columns):
            at = n // matrix.block[0], k // matrix.block[1]
            value = matrix.codes[n, k].float() * matrix.scales[at]
            value += 0 if matrix.offsets is None else matrix.offsets[at]
            out[n, k if matrix.order is None else int(matrix.order[k])] = value
    return out


@pytest.mark.parametrize("block", [(1, 4), (4, 8), (6, 16), (1, 16), (4, 5)])
def test_dequantize(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_matrix, "PIECE_VALUES", 32)  # a few rows at a time
    matrix = random_matrix(block=block)
    torch.testing.assert_close(matrix.dequantize(torch.float32), by_hand(matrix))


def test_dequantize_in_another_order() -> None:
    made = random_matrix()
    matrix = BlockMatrix(made.codes, made.scales, None, made.block, torch.randperm(16))
    torch.testing.assert_close(matrix.dequantize(torch.float32), by_hand(matrix))


def test_rows() -> None:
    matrix, index = random_matrix(), torch.tensor([4, 0, 4])
    taken = take_rows(matrix, index)
    assert isinstance(taken, BlockMatrix)
    assert torch.equal(taken.dequantize(torch.float32), matrix.dequantize(torch.float32)[index])


def test_stack_takes_the_larger_scale_of_what_it_multiplies() -> None:
    first = replace(random_matrix(4), input_scale=0.5)
    both = stack([first, replace(random_matrix(2), input_scale=0.25)], torch.float32)
    lacking = stack([first, random_matrix(2)], torch.float32)
    assert isinstance(both, BlockMatrix) and both.input_scale == 0.5
    assert isinstance(lacking, BlockMatrix) and lacking.input_scale == 0.0


def test_stack_keeps_what_is_quantized_alike() -> None:
    first, second = random_matrix(4), random_matrix(2)
    both = stack([first, second], torch.float32)
    assert isinstance(both, BlockMatrix) and both.shape == (6, 16)
    parts = first.dequantize(torch.float32), second.dequantize(torch.float32)
    assert torch.equal(both.dequantize(torch.float32), torch.cat(parts))


@pytest.mark.parametrize(
    "other",
    [
        random_matrix(block=(1, 8)),
        random_matrix(block=(2, 4)),
        BlockMatrix(torch.ones(6, 16, dtype=torch.int8), torch.ones(6, 2), None, (1, 8)),
    ],
)
def test_stack_of_different_codes_is_quantized_finely(other: BlockMatrix) -> None:
    first = random_matrix()
    both = stack([first, other], torch.float32)
    assert isinstance(both, BlockMatrix) and both.block == (1, 4)
    parts = first.dequantize(torch.float32), other.dequantize(torch.float32)
    assert torch.equal(both.dequantize(torch.float32), torch.cat(parts))


@pytest.mark.parametrize(
    "other",
    [
        torch.rand(6, 16),
        BlockMatrix(torch.ones(6, 16).to(torch.float8_e4m3fn), torch.ones(6, 1), None, (1, 16)),
        BlockMatrix(torch.full((6, 16), -128).to(torch.uint8), torch.ones(6, 4), None, (1, 4)),
    ],
    ids=["tensor", "float8", "large"],
)
def test_stack_of_different_kinds_is_a_tensor(other: BlockMatrix | torch.Tensor) -> None:
    first = random_matrix()
    first = BlockMatrix(first.codes.to(torch.int8), first.scales, first.offsets, first.block)
    both = stack([first, other], torch.float32)
    assert isinstance(both, torch.Tensor) and both.shape == (12, 16)


def test_float8_rows_and_stack_by_rows() -> None:
    codes = torch.randn(6, 16).to(torch.float8_e4m3fn)
    matrix = BlockMatrix(codes, torch.rand(2, 2), None, (4, 8))
    order = torch.tensor([3, 1, 5])
    both = stack([matrix.by_rows().rows(order), matrix], torch.float32)
    wide = matrix.dequantize(torch.float32)
    assert isinstance(both, BlockMatrix)
    assert torch.equal(both.dequantize(torch.float32), torch.cat([wide[order], wide]))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unpack(bits: int) -> None:
    per = 32 // bits
    codes = torch.randint(0, 1 << bits, (3, 2 * per), dtype=torch.int64)
    words = torch.zeros(3, 2, dtype=torch.int64)
    for i in range(per):
        words |= codes[:, i::per] << (bits * i)
    signed = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    assert torch.equal(unpack(signed, bits).long(), codes)
