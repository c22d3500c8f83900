"""Quantized checkpoints: every layout gives the weights that its method says it stores.

The layouts are written by ``quantizers``.
"""

from pathlib import Path

import pytest
import torch
from quantizers import CASES, quantized
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from zlm.errors import ModelError
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.weights.load import FedFolderWeights, open_weights
from zlm.weights.quantized import QuantizedWeights


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose products have edges that no block of 128 divides."""
    folder = tmp_path_factory.mktemp("plain")
    return tiny_checkpoint(folder, "llama", hidden_size=192, intermediate_size=320)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_scheme_stores(plain: Path, tmp_path: Path, case: str) -> None:
    config, quantize = CASES[case]
    folder = tmp_path / "quantized"
    expected = quantized(plain, folder, config, quantize)
    spec = load_spec(folder)
    weights = open_weights(folder, spec)
    assert set(weights.names()) == set(expected)
    assert spec.quantization == config.get("checkpoint_format", config["quant_method"])
    fed = QuantizedWeights(FedFolderWeights(folder, spec, torch.device("cpu")), spec.quantization)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights.get(name).float(), tensor.float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights.get(name), fed.get(name)), name
    model = registry.build(spec, weights, ops=CpuOps(torch.float32), max_model_len=64)
    assert model is not None


def test_parts_that_do_not_agree_are_named(plain: Path, tmp_path: Path) -> None:
    config, quantize = CASES["awq"]
    folder = tmp_path / "damaged"
    quantized(plain, folder, config, quantize)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    tensors[f"{name}scales"] = tensors[f"{name}scales"][:, :-8].contiguous()
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(folder, load_spec(folder))
    with pytest.raises(ModelError, match=r"up_proj\.weight do not agree: .*320, 320 and 312 rows"):
        weights.get(f"{name}weight")


def test_a_part_that_is_missing_is_told_when_the_model_is_built(
    plain: Path, tmp_path: Path
) -> None:
    config, quantize = CASES["gptq"]
    folder = tmp_path / "damaged"
    quantized(plain, folder, config, quantize)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.scales"]
    save_file(tensors, folder / "model.safetensors")
    spec = load_spec(folder)
    with pytest.raises(ModelError, match=r"lacks the tensor .*q_proj\.weight"):
        registry.build(
            spec, open_weights(folder, spec), ops=CpuOps(torch.float32), max_model_len=64
        )
