"""gpt-oss as it is published, with MXFP4 experts: what transformers' own reading gives."""

from functools import partial
from pathlib import Path

import pytest
import torch
from counting_weights import Counting
from safetensors.torch import save_file
from tiny import tiny_checkpoint
from tiny_quantized import with_mxfp4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from zlm.errors import ModelError
from zlm.models import registry, shares
from zlm.models.config import load_spec
from zlm.ops import gpu_packing
from zlm.ops.cpu import CpuOps
from zlm.weights import load
from zlm.weights.load import FedFolderWeights, open_weights
from zlm.weights.mxfp4 import MXFP4Weights
from zlm.weights.parts import chosen
from zlm.weights.raw import RawFile
from zlm.weights.region import Choose, whole
from zlm.worker import gpu_costs

Tensors = dict[str, torch.Tensor]


def packed(folder: Path) -> tuple[Tensors, Tensors]:
    """Put random MXFP4 in the place of the experts; return what is stored and what it means."""
    stored = with_mxfp4(folder)
    meant = dict(stored)
    for name in [n.removesuffix("_blocks") for n in stored if n.endswith("_blocks")]:
        parts = (meant.pop(name + part) for part in ("_blocks", "_scales"))
        meant[name] = convert_moe_packed_tensors(*parts)
    return stored, meant


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "gpt_oss", dtype="bfloat16", tokenizer=False)


def test_weights_are_those_of_transformers(folder: Path) -> None:
    stored, meant = packed(folder)
    spec = load_spec(folder)
    assert (spec.quantization, spec.checkpoint_dtype) == ("mxfp4", "bfloat16")
    fed = MXFP4Weights(FedFolderWeights(folder, spec, torch.device("cpu")))
    for weights in (open_weights(folder, spec), fed):
        assert isinstance(weights, MXFP4Weights)
        assert set(weights.names()) == set(meant) and set(meant) != set(stored)
        for name, tensor in meant.items():
            assert torch.equal(weights.get(name), tensor), name
            matrix = weights.matrix(name)
            assert (matrix is not None) == name.endswith(("gate_up_proj", "down_proj"))
            if matrix is not None:
                rows = tensor.transpose(1, 2).flatten(0, 1)
                assert torch.equal(matrix.dequantize(torch.bfloat16), rows)
        weights.close()
    ops = CpuOps(torch.float32)
    registry.build(spec, open_weights(folder, spec), ops=ops, max_model_len=64)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_reads_the_blocks_of_its_part_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, device: str
) -> None:
    """Issue 8. The 3 blocks of 96 inner columns stay whole: of some ranks some are padding. What a
    GPU keeps of them are codes, as many bytes as the memory plan counts.
    """
    _, meant = packed(folder)
    spec = load_spec(folder)
    stored, fed = Counting(folder, spec), FedFolderWeights(folder, spec, torch.device("cpu"))
    sizes: list[int] = []
    read_into = RawFile.read_into

    def count(file: RawFile, buffer: memoryview, offset: int) -> None:
        sizes.append(len(buffer))
        read_into(file, buffer, offset)

    monkeypatch.setattr(RawFile, "read_into", count)
    monkeypatch.setattr(load, "LEAST_RUN_BYTES", 1)
    weights = MXFP4Weights(stored if device == "cpu" else fed)

    def num_read(name: str, choose: Choose) -> int:
        """Return how many bytes are read of a tensor, which must be right, and its matrix too."""
        before = stored.read + sum(sizes)
        part = weights.part(name, choose)
        found = stored.read + sum(sizes) - before
        matrix = weights.matrix(name, choose)
        assert stored.read + sum(sizes) - before == 2 * found
        assert torch.equal(part, chosen(meant[name], choose))
        rows = part.transpose(1, 2).flatten(0, 1)
        assert matrix is not None and torch.equal(matrix.dequantize(torch.bfloat16), rows)
        codes = gpu_packing.pack(matrix, torch.device("cpu"))
        assert codes is not None and codes.floats and codes.is_packed
        assert codes.nbytes == matrix.codes.numel() * gpu_costs.MXFP4_BYTES
        return found

    inner, outer = (f"model.layers.0.mlp.experts.{last}" for last in ("gate_up_proj", "down_proj"))
    for rank in range(ranks):
        own = {
            name: partial(shares.region, spec, name, rank=rank, ranks=ranks)
            for name in (inner, outer)
        }
        each = -(-3 // ranks)
        num_blocks = min(rank * each + each, 3) - min(rank * each, 3)
        for name in (inner, outer):
            assert num_read(name, own[name]) * 3 == num_read(name, whole) * num_blocks
    weights.close()


def test_parts_that_do_not_agree_are_named(folder: Path) -> None:
    stored, _ = packed(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    stored[f"{name}_scales"] = stored[f"{name}_scales"][:, :-1].contiguous()
    save_file(stored, folder / "model.safetensors")
    weights = open_weights(folder, load_spec(folder))
    with pytest.raises(ModelError, match=rf"quantized {name} do not agree: .*shapes"):
        weights.get(name)
