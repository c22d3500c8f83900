"""Issue 6: scales of fp8 keys and values come from the checkpoint, whoever wrote it."""

import json
from pathlib import Path

import pytest
import torch
from paged_steps import PagedSequences
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from zlm.config import CacheOptions, Config, ModelOptions, ModelSpec, resolve
from zlm.errors import ModelError
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.ops.kv_cache import FP8
from zlm.weights.load import open_weights
from zlm.worker import group_caches

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}
FORMS = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "output-scale": ("k_proj.output_scale", "v_proj.output_scale"),
    "one-for-both": ("kv_scale", "kv_scale"),
}


def checkpoint(folder: Path, names: tuple[str, str], scales: tuple[torch.Tensor, ...]) -> ModelSpec:
    tiny_checkpoint(folder, "llama")
    tensors = load_file(folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    for layer in range(content["num_hidden_layers"]):
        for name, scale in zip(names, scales, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = scale.clone()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": CONFIG}))
    return load_spec(folder)


def built(folder: Path, spec: ModelSpec, kv_dtype: torch.dtype) -> PagedSequences:
    ops = CpuOps(torch.float32, kv_dtype=kv_dtype)
    model = registry.build(spec, open_weights(folder, spec), ops=ops, max_model_len=64)
    return PagedSequences(model, spec, dtype=kv_dtype, ops=ops)


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_found_and_used(tmp_path: Path, form: str) -> None:
    scales = torch.tensor(0.5), torch.tensor([0.25])
    scales = (scales[0], scales[0]) if form == "one-for-both" else scales
    spec = checkpoint(tmp_path, FORMS[form], scales)
    assert spec.kv_cache_dtype == "fp8_e4m3"
    ids = list(range(5, 25))
    exact = built(tmp_path, spec, torch.float32)
    rounded = built(tmp_path, spec, FP8)
    found = rounded.model.layers[1].attention.attention.kv_scales  # type: ignore[attr-defined]
    assert found[:, 0].tolist() == [scale.item() for scale in scales]
    first, second = (each.step([(0, ids[:12])])[0] for each in (exact, rounded))
    for token in ids[12:]:
        first, second = (each.step([(0, [token])])[0] for each in (exact, rounded))
    assert 0 < (first - second).abs().max() < 0.1 * first.abs().max()


def test_a_scale_for_each_head(tmp_path: Path) -> None:
    each = torch.tensor([0.5, 0.125])
    spec = checkpoint(tmp_path, FORMS["compressed-tensors"], (each.view(2, 1, 1), each))
    model = built(tmp_path, spec, FP8).model
    found = model.layers[0].attention.attention.kv_scales  # type: ignore[attr-defined]
    assert torch.equal(found, torch.stack((each, each)))


@pytest.mark.parametrize("scale", [torch.tensor([0.5, 0.5, 0.5]), torch.tensor(-1.0)])
def test_what_is_no_scale_is_named(tmp_path: Path, scale: torch.Tensor) -> None:
    spec = checkpoint(tmp_path, FORMS["compressed-tensors"], (scale, torch.tensor(1.0)))
    built(tmp_path, spec, torch.float32)  # where none is needed, none is looked at
    with pytest.raises(ModelError, match=r"self_attn\.k_scale must be one positive number, or one"):
        built(tmp_path, spec, FP8)


@pytest.mark.parametrize(
    ("device", "wanted", "kept"),
    [
        ("cuda", "auto", FP8),  # what the checkpoint was made for
        ("cuda", "bfloat16", torch.bfloat16),
        ("cpu", "auto", torch.bfloat16),
        ("cpu", "fp8", FP8),
    ],
)
def test_which_type_the_cache_has(tmp_path: Path, device: str, wanted: str, kept: object) -> None:
    spec = checkpoint(tmp_path, FORMS["modelopt"], (torch.tensor(1.0), torch.tensor(1.0)))
    cache = CacheOptions(kv_cache_dtype=wanted)
    options = Config(model=ModelOptions(model=str(tmp_path)), cache=cache)
    where = {"model_path": str(tmp_path), "tokenizer_path": str(tmp_path)}
    resolved = resolve(options, spec, device=device, **where)
    assert group_caches.kv_type(resolved, torch.bfloat16) == kept
