"""Quantized checkpoints: every layout gives the weights that its method says it stores.

The layouts are written by ``quantizers``.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from counting_weights import Counting
from paged_steps import PagedSequences
from quantizers import CASES, quantized
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from zlm.errors import ModelError
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.weights.load import FedFolderWeights, open_weights
from zlm.weights.parts import read_part
from zlm.weights.quantized import QuantizedWeights
from zlm.weights.region import Region


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


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_part_alone(tmp_path: Path, case: str) -> None:
    """Issue 8: rows and columns, and both halves of two ranges, are what the whole has there."""
    folder = tmp_path / "quantized"
    plain = tiny_checkpoint(tmp_path / "plain", "llama", hidden_size=256, intermediate_size=512)
    quantized(plain, folder, *CASES[case])
    spec = load_spec(folder)
    stored = Counting(folder, spec)
    weights = QuantizedWeights(stored, str(spec.quantization))
    for module, shape in (("gate_proj", (512, 256)), ("down_proj", (256, 512))):
        name = f"model.layers.0.mlp.{module}.weight"
        stored.read = 0
        all_of_it = weights.get(name)
        total = stored.read
        for dim, size in enumerate(shape):
            quarter = size // 4 if "block" not in case else size // 2
            for ranges in (((size // 2, size),), ((0, quarter), (size - quarter, size))):
                region = Region(dim, ranges)
                stored.read = 0
                part = weights.part(name, lambda _, region=region: region)
                assert torch.equal(part, read_part(all_of_it, region))
                is_cut = "act-order" in case or case == "gptq-8-bit"  # columns in no order
                share = sum(end - first for first, end in ranges) / size
                assert stored.read < (share + 0.1) * total or (is_cut and dim == 1), (dim, ranges)
    uneven = Region(0, ((1, 3),))
    assert torch.equal(weights.part(name, lambda _: uneven), read_part(all_of_it, uneven))


def test_experts_that_were_taken_apart(tmp_path: Path) -> None:
    """Llama 4's are one tensor a layer, and one each where compressed-tensors' tools wrote them."""
    plain = tiny_checkpoint(tmp_path / "plain", "llama4")
    tensors = load_file(plain / "model.safetensors")
    apart = {}
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".")
        if not base.endswith("experts"):
            apart[name] = tensor
            continue
        pieces = {"gate_proj": 0, "up_proj": 1} if last == "gate_up_proj" else {last: 0}
        for index, expert in enumerate(tensor):
            for piece, place in pieces.items():
                values = expert.chunk(len(pieces), 1)[place].t().contiguous()
                apart[f"{base}.{index}.{piece}.weight"] = values
    shutil.copytree(plain, tmp_path / "apart")
    content = json.loads((plain / "config.json").read_text())
    content["quantization_config"] = CASES["compressed-fp8-channel"][0]
    (tmp_path / "apart" / "config.json").write_text(json.dumps(content))
    save_file(apart, tmp_path / "apart" / "model.safetensors")
    logits = []
    for folder in (plain, tmp_path / "apart"):
        spec = load_spec(folder)
        ops = CpuOps(torch.float32)
        model = registry.build(spec, open_weights(folder, spec), ops=ops, max_model_len=64)
        logits.append(PagedSequences(model, spec).step([(0, list(range(10, 40)))])[0])
    assert torch.equal(*logits)


def test_static_scales_of_activations_are_read(plain: Path, tmp_path: Path) -> None:
    config, quantize = CASES["compressed-fp8-tensor"]
    inputs = {"num_bits": 8, "type": "float", "dynamic": False}
    how = {"config_groups": {"group_0": {"input_activations": inputs}}}
    folder = tmp_path / "static"
    quantized(plain, folder, config | how, quantize)
    tensors = load_file(folder / "model.safetensors")
    base = "model.layers.0.mlp.up_proj."
    tensors[f"{base}input_scale"] = torch.tensor(0.25).bfloat16()
    tensors["model.layers.1.mlp.up_proj.input_zero_point"] = torch.tensor([3]).char()
    tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(folder, load_spec(folder))
    assert isinstance(weights, QuantizedWeights)
    matrices = [weights.matrix(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)]
    assert [matrix and matrix.input_scale for matrix in matrices] == [0.25, 0.0]
    with pytest.raises(ModelError, match=r"down_proj\.weight.*input_scale must be one positive"):
        weights.matrix("model.layers.0.mlp.down_proj.weight")
    inputs["dynamic"] = True
    quantized(plain, tmp_path / "dynamic", config | how, quantize)
    weights = open_weights(tmp_path / "dynamic", load_spec(tmp_path / "dynamic"))
    assert isinstance(weights, QuantizedWeights)
    matrix = weights.matrix("model.layers.0.mlp.up_proj.weight")
    assert matrix is not None and matrix.input_scale == 0.0, "it has one all the same"


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


def test_codes_without_scales_are_no_weight(plain: Path, tmp_path: Path) -> None:
    """They would be read as if their scale were 1: whole, and by a rank that reads its part."""
    folder = tmp_path / "damaged"
    quantized(plain, folder, *CASES["fp8-block"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(folder, load_spec(folder))
    assert isinstance(weights, QuantizedWeights)
    words = rf"{name} is stored as torch.float8_e4m3fn, and its scales are missing"
    with pytest.raises(ModelError, match=words):
        weights.get(name)
    with pytest.raises(ModelError, match=words):
        weights.part(name, lambda _: Region(0, ((0, 16),)))
