"""Parts of tensors and of quantized weights are what is cut from the whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import SPECS

from zlm.ops.block_matrix import BlockMatrix
from zlm.weights import load
from zlm.weights.load import FedFolderWeights, FolderWeights
from zlm.weights.parts import part_of_matrix, read_part
from zlm.weights.region import Region

ROWS, COLUMNS = 48, 96
REGIONS = {
    "rows": Region(0, ((16, 32),)),
    "rows of two": Region(0, ((0, 8), (24, 32))),
    "rows and padding": Region(0, ((40, 48),), 8),
    "padding alone": Region(0, ((48, 48),), 16),
    "columns": Region(1, ((32, 64),)),
    "columns and padding": Region(1, ((64, 96),), 32),
    "padding of columns alone": Region(1, ((96, 96),), 32),
    "columns across blocks": Region(1, ((48, 96),)),
    "columns of two": Region(1, ((0, 24), (48, 72))),
}
BLOCKS = [(1, 32), (1, COLUMNS), (ROWS, COLUMNS), (16, 32), (32, 64), (1, 1)]


def cut(whole: torch.Tensor, region: Region) -> torch.Tensor:
    pieces = [whole.narrow(region.dim, a, b - a) for a, b in region.ranges]
    shape = list(whole.shape)
    shape[region.dim] = region.zeros
    return torch.cat([*pieces, whole.new_zeros(shape)], region.dim)


@pytest.mark.parametrize("has_offsets", [True, False], ids=["offsets", "no-offsets"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", REGIONS)
def test_a_part_of_a_quantized_weight(name: str, block: tuple[int, int], has_offsets: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    grid = -(-ROWS // block[0]), -(-COLUMNS // block[1])
    codes = torch.randint(1, 16, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    scales = torch.rand(grid, generator=generator)
    offsets = torch.rand(grid, generator=generator) if has_offsets else None
    whole = BlockMatrix(codes, scales, offsets, block)
    part = part_of_matrix(whole, REGIONS[name])
    assert part is not None
    expected = cut(whole.dequantize(torch.float32), REGIONS[name])
    assert part.shape == tuple(expected.shape)
    assert torch.equal(part.dequantize(torch.float32), expected)


def test_columns_that_are_out_of_order_are_not_cut() -> None:
    order = torch.randperm(COLUMNS)
    codes = torch.ones(ROWS, COLUMNS, dtype=torch.uint8)
    whole = BlockMatrix(codes, torch.ones(ROWS, 3), None, (1, 32), order)
    assert part_of_matrix(whole, REGIONS["columns"]) is None
    rows = part_of_matrix(whole, REGIONS["rows"])
    assert rows is not None and rows.order is order


@pytest.mark.parametrize("kind", [FolderWeights, FedFolderWeights])
@pytest.mark.parametrize("name", REGIONS)
def test_a_part_of_a_file(
    name: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "LEAST_RUN_BYTES", 30)  # some of the columns' runs are shorter
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS).bfloat16()
    save_file({"model.norm.weight": whole}, tmp_path / "model.safetensors")
    arguments = () if kind is FolderWeights else (torch.device("cpu"),)
    weights = kind(tmp_path, SPECS["llama"], *arguments)
    shapes: list[Sequence[int]] = []

    def choose(shape: Sequence[int]) -> Region:
        shapes.append(shape)
        return REGIONS[name]

    part = weights.part("model.norm.weight", choose)
    assert part.is_contiguous() and part.dtype == torch.bfloat16
    assert torch.equal(part, cut(whole, REGIONS[name])) and list(shapes[0]) == [ROWS, COLUMNS]
    assert torch.equal(weights.part("model.norm.weight", lambda shape: None), whole)
    assert torch.equal(read_part(whole, REGIONS[name]), part)
    weights.close()
