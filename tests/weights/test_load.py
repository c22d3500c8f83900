"""Weights of folders and GGUF files: one set of names, one form, whatever the file holds."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint, tiny_gguf

from zlm.config import ModelSpec
from zlm.errors import ModelError
from zlm.models.config import load_spec
from zlm.weights.load import FedFolderWeights, Weights, open_weights


def read_all(path: Path, spec: ModelSpec | None = None) -> dict[str, torch.Tensor]:
    weights = open_weights(path, spec or load_spec(path))
    tensors = {name: weights.get(name) for name in weights.names()}
    weights.close()
    return tensors


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


# ---------------------------------------------------------------------------------------- folders


def test_one_file(llama: Path) -> None:
    assert_same(read_all(llama), load_file(llama / "model.safetensors"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_come_as_stored(tmp_path: Path, dtype: str) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen2", dtype=dtype)
    assert load_spec(folder).checkpoint_dtype == dtype
    assert_same(read_all(folder), load_file(folder / "model.safetensors"))


def test_shards_with_a_stale_one_beside_them(llama: Path, tmp_path: Path) -> None:
    """CASES 104: equal tensors from one file, from shards, and with a file the index ignores."""
    folder = tiny_checkpoint(tmp_path, "llama", shards=3)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    whole = read_all(llama)
    assert_same(read_all(folder), whole)
    stale = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    save_file(stale, folder / "model-00009-of-00009.safetensors")
    save_file(stale, folder / "model.safetensors")
    assert_same(read_all(folder), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_fed_to_a_device_is_the_same(tmp_path: Path, dtype: str) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", dtype=dtype, shards=2)
    fed = FedFolderWeights(folder, load_spec(folder), torch.device("cpu"))
    expected = read_all(folder)
    assert list(fed.names()) == list(expected)
    assert_same({name: fed.get(name) for name in fed.names()}, expected)
    fed.close()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", shards=3)
    shard = sorted(folder.glob("model-00002*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} is missing"):
        read_all(folder)


def test_a_tensor_that_the_index_promises_in_vain(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", shards=3)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.7.x"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.7\.x"):
        read_all(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_cut_file_is_named(llama: Path, tmp_path: Path, kept: int) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "cut"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        read_all(folder)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32"',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b"\xff\xfe{}",
        b'{"a": {"dtype": "F3", "shape": [2], "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
    ],
)
def test_a_damaged_header_is_named(llama: Path, tmp_path: Path, header: bytes) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    content = len(header).to_bytes(8, "little") + header + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        read_all(tmp_path, load_spec(llama))


def test_pickles_are_not_loaded(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"holds no safetensors weights$"):
        read_all(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin"):
        read_all(tmp_path)


def test_multimodal_and_bare_names(tmp_path: Path) -> None:
    """All ways to save Gemma 3's text half give the same names: new, old, and without a head."""
    folder = tiny_checkpoint(tmp_path / "m", "gemma3_multimodal")
    stored = load_file(folder / "model.safetensors")
    text = {n.split("language_model.")[-1]: t for n, t in stored.items() if "language_model" in n}
    inner = {n.removeprefix("model."): t for n, t in text.items() if "lm_head" not in n}
    expected = {f"model.{n}": t for n, t in inner.items()}
    assert len(expected) == 2 + 6 * 13
    assert any("vision" in name for name in stored)
    assert_same(read_all(folder), expected)
    spec = load_spec(folder)
    for prefix in ("language_model.model.", "model.language_model.", ""):
        other = tmp_path / (prefix or "bare")
        other.mkdir()
        shutil.copy(folder / "config.json", other)
        extra = {} if not prefix else {"vision_tower.x": torch.ones(1)}
        tensors = {f"{prefix}{n}": t for n, t in inner.items()} | extra
        save_file(tensors, other / "model.safetensors")
        assert_same(read_all(other, spec), expected)


def test_unknown_tensors_are_shown_and_computed_ones_are_not(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    tensors = load_file(llama / "model.safetensors")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.surprise": torch.ones(2, dtype=torch.int64),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    names = set(open_weights(tmp_path, load_spec(tmp_path)).names())
    assert names == set(tensors) | {"model.layers.0.surprise"}


# ------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_gguf_gives_the_folder_back(family: str, tmp_path: Path) -> None:
    keys = {"query_pre_attn_scalar": 32} if family == "gemma3" else {}
    folder = tiny_checkpoint(tmp_path / family, family, **keys)
    exact = read_all(tiny_gguf(tmp_path / "f32.gguf", folder))
    expected = load_file(folder / "model.safetensors")
    assert set(exact) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(exact[name], tensor, rtol=0, atol=1e-7), name
    rounded = read_all(tiny_gguf(tmp_path / "q8.gguf", folder, quant="Q8_0"))
    for name, tensor in expected.items():
        assert torch.allclose(rounded[name], tensor, rtol=0, atol=0.02), name
    assert any(not torch.equal(rounded[name], exact[name]) for name in expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gguf_equals_transformers_own_reader(family: str, tmp_path: Path) -> None:
    """Names, row order and norms as another reader of the format has them."""
    from transformers import AutoModelForCausalLM

    keys = {"query_pre_attn_scalar": 32} if family == "gemma3" else {}
    folder = tiny_checkpoint(tmp_path / family, family, **keys)
    file = tiny_gguf(tmp_path / "model.gguf", folder)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    theirs = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    ours = read_all(file)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-6), name


def test_llama3_scaling_of_a_gguf_is_exact(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "llama", rope="llama3")
    file = tiny_gguf(tmp_path / "m.gguf", folder)
    spec = load_spec(file)
    assert "rope_freqs.weight" not in set(open_weights(file, spec).names())
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder))
    powers = spec.rope.theta ** (torch.arange(0, 16, 2).float() / 16)
    assert spec.rope.short_factor == spec.rope.long_factor
    assert spec.rope.attention_factor == 1.0
    ours = 1.0 / (torch.tensor(spec.rope.short_factor) * powers)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def test_tied_embeddings_in_all_forms_show_in_the_names(tmp_path: Path) -> None:
    """CASES 102: names() says whether a head is there; the spec says whether it is needed."""
    head = "lm_head.weight"
    tied = tiny_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    free = tiny_checkpoint(tmp_path / "free", "llama", tie_word_embeddings=False)
    assert load_spec(tied).tie_embeddings and head not in read_all(tied)
    assert not load_spec(free).tie_embeddings and head in read_all(free)
    tensors = load_file(tied / "model.safetensors")
    tensors[head] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tied / "model.safetensors")
    assert load_spec(tied).tie_embeddings and head in read_all(tied)
    file = tiny_gguf(tmp_path / "free.gguf", free)
    assert not load_spec(file).tie_embeddings and head in read_all(file)
    tensors.pop(head)
    save_file(tensors, tied / "model.safetensors")
    file = tiny_gguf(tmp_path / "tied.gguf", tied)
    assert load_spec(file).tie_embeddings and head not in read_all(file)


def test_what_is_got_belongs_to_the_caller(llama: Path, tmp_path: Path) -> None:
    for path in (llama, tiny_gguf(tmp_path / "m.gguf", llama)):
        weights: Weights = open_weights(path, load_spec(path))
        first = weights.get("model.norm.weight")
        expected = first.clone()
        first.zero_()
        assert torch.equal(weights.get("model.norm.weight"), expected)
        with pytest.raises(KeyError):
            weights.get("model.absent")
        weights.close()
