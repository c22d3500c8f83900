"""gpt-oss as it is published, with MXFP4 experts: what transformers' own reading gives."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from zlm.errors import ModelError
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.weights.load import FedFolderWeights, open_weights
from zlm.weights.mxfp4 import MXFP4Weights

Tensors = dict[str, torch.Tensor]


def packed(folder: Path) -> tuple[Tensors, Tensors]:
    """Put random MXFP4 in the place of the experts; return what is stored and what it means."""
    generator = torch.Generator().manual_seed(0)
    stored = load_file(folder / "model.safetensors")
    meant = dict(stored)
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        assert columns % 32 == 0
        shape = experts, rows, columns // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
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


def test_parts_that_do_not_agree_are_named(folder: Path) -> None:
    stored, _ = packed(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    stored[f"{name}_scales"] = stored[f"{name}_scales"][:, :-1].contiguous()
    save_file(stored, folder / "model.safetensors")
    weights = open_weights(folder, load_spec(folder))
    with pytest.raises(ModelError, match=rf"quantized {name} do not agree: .*shapes"):
        weights.get(name)
