"""What a checkpoint must hold, and what is said when it does not."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tiny import FAMILIES, tiny_checkpoint

from zlm.config import ModelSpec
from zlm.errors import ModelError
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.models.registry import Model
from zlm.models.tensors import expected_tensors
from zlm.ops.block_matrix import BlockMatrix
from zlm.ops.cpu import CpuOps
from zlm.weights.load import open_weights
from zlm.weights.parts import chosen_matrix
from zlm.weights.region import Choose

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class Tensors(dict[str, torch.Tensor]):
    """A checkpoint in memory."""

    def names(self) -> list[str]:
        return list(self)

    def get(self, name: str) -> torch.Tensor:  # type: ignore[override]
        return self[name].clone()


def read(folder: Path) -> tuple[ModelSpec, Tensors]:
    spec = load_spec(folder)
    weights = open_weights(folder, spec)
    return spec, Tensors({name: weights.get(name) for name in weights.names()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2", tie_word_embeddings=False)


@pytest.fixture
def spec(folder: Path) -> ModelSpec:
    return load_spec(folder)


@pytest.fixture
def tensors(folder: Path) -> Tensors:
    return read(folder)[1]


def build(spec: ModelSpec, tensors: Tensors) -> Model:
    return registry.build(spec, tensors, ops=CpuOps(torch.float32), max_model_len=64)


def logits_of(model: Model, spec: ModelSpec) -> torch.Tensor:
    hidden = torch.linspace(-1, 1, 2 * spec.hidden_size).view(2, -1)
    with torch.inference_mode():
        return model.logits(hidden).clone()


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.endswith("_multimodal")])
def test_expected_tensors_are_what_transformers_writes(tmp_path: Path, family: str) -> None:
    spec, tensors = read(tiny_checkpoint(tmp_path, family, tokenizer=False))
    assert expected_tensors(spec) == {name: tuple(t.shape) for name, t in tensors.items()}


def test_missing_tensors_are_named(spec: ModelSpec, tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.wei"):
        build(spec, tensors)


def test_many_missing_tensors_are_counted(spec: ModelSpec, tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        del tensors[name]
    with pytest.raises(ModelError, match=r"lacks 12 tensors: .*, .* and 7 more"):
        build(spec, tensors)


def test_unexpected_tensors_are_named(spec: ModelSpec, tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.qweight"] = torch.zeros(1)
    with pytest.raises(ModelError, match=r"holds the tensor .*q_proj\.qweight, which a qwen2"):
        build(spec, tensors)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, "model.layers.0.self_attn.k_proj.bias"])
def test_wrong_shapes_are_named(spec: ModelSpec, tensors: Tensors, name: str) -> None:
    tensors[name] = torch.zeros(3, 5)
    with pytest.raises(ModelError, match=rf"{name} has shape \[3, 5\], the configuration implies"):
        build(spec, tensors)


def test_unknown_architecture(spec: ModelSpec, tensors: Tensors) -> None:
    other = msgspec.structs.replace(spec, architecture="mamba")
    with pytest.raises(ModelError, match=r"mamba is not supported \(known: llama, "):
        build(other, tensors)


def test_untied_without_a_head_is_refused(spec: ModelSpec, tensors: Tensors) -> None:
    """CASES 102."""
    del tensors[HEAD]
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight, .* not tied"):
        build(spec, tensors)


def test_tied_without_a_head(spec: ModelSpec, tensors: Tensors) -> None:
    expected = logits_of(build(spec, Tensors(tensors, **{HEAD: tensors[EMBEDDING]})), spec)
    del tensors[HEAD]
    tied = msgspec.structs.replace(spec, tie_embeddings=True)
    assert torch.equal(logits_of(build(tied, tensors), spec), expected)


@pytest.mark.parametrize("differs", [False, True])
def test_tied_with_a_head(
    spec: ModelSpec, tensors: Tensors, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tied = msgspec.structs.replace(spec, tie_embeddings=True)
    if not differs:
        tensors[HEAD] = tensors[EMBEDDING]
    with caplog.at_level(logging.WARNING):
        model = build(tied, tensors)
    assert ("differs from" in caplog.text) is differs
    del tensors[HEAD]
    assert torch.equal(logits_of(model, spec), logits_of(build(tied, tensors), spec))


@pytest.mark.parametrize(
    "rename", [lambda n: n.removeprefix("model."), lambda n: n], ids=["bare", "whole"]
)
def test_buffers_that_are_computed_here_are_ignored(
    folder: Path, tmp_path: Path, rename: Callable[[str], str]
) -> None:
    """And so is the missing prefix of a checkpoint of the bare model, when tied."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    stored = {rename(name): tensor for name, tensor in load_file(file).items() if name != HEAD}
    stored[rename("model.layers.0.self_attn.rotary_emb.inv_freq")] = torch.zeros(8)
    save_file(stored, file)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": True})
    )
    spec = load_spec(tmp_path / "copy")
    weights = open_weights(tmp_path / "copy", spec)
    registry.build(spec, weights, ops=CpuOps(torch.float32), max_model_len=64)


def test_a_quantized_weight_of_another_shape_is_told(spec: ModelSpec, tensors: Tensors) -> None:
    """Weights that stay quantized are checked as tensors are."""

    def quantized(name: str, choose: Choose) -> BlockMatrix | None:
        if not name.endswith("o_proj.weight"):
            return None
        codes = torch.zeros(8, 32, dtype=torch.uint8)
        return chosen_matrix(BlockMatrix(codes, torch.ones(8, 1), None, (1, 32)), choose)

    ops = CpuOps(torch.bfloat16, quantized=True)
    with pytest.raises(ModelError, match=r"o_proj\.weight has shape \[8, 32\]"):
        registry.build(spec, tensors, ops=ops, max_model_len=64, quantized=quantized)
