"""load_spec of GGUF files: the same facts as the folder they were made from."""

import math
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from tiny import finish_gguf, tiny_checkpoint, tiny_gguf

from zlm.config import RopeSpec
from zlm.errors import ModelError
from zlm.models.config import load_spec

# What a folder must be like for a file to say the same: it leaves this out.
KEYS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1], "num_hidden_layers": 5},
    "qwen3_moe": {"mlp_only_layers": []},
    "phi3-longrope": {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75},
}


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        *((family, rope) for family in ("llama", "gemma3") for rope in (None, "linear")),
        *((family, None) for family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral")),
        *((family, None) for family in ("gemma2", "olmo2", "olmo3", "smollm3", "phi3")),
        ("phi3", "longrope"),
    ],
)
def test_gguf_means_what_the_folder_means(family: str, rope: str | None, tmp_path: Path) -> None:
    keys = KEYS.get(f"{family}-{rope}", KEYS.get(family, {}))
    folder = tiny_checkpoint(tmp_path / "m", family, rope=rope, **keys)
    ours = load_spec(tiny_gguf(tmp_path / "m.gguf", folder))
    expected = load_spec(folder)
    if expected.experts is not None:  # in a file all experts are one tensor
        experts = msgspec.structs.replace(expected.experts, layout="stacked")
        expected = msgspec.structs.replace(expected, experts=experts)
    if rope == "longrope":  # of which a file says what it comes to
        factor = math.sqrt(1 + math.log(8) / math.log(64))
        assert ours.rope.attention_factor == pytest.approx(factor)
        same_rope = {"attention_factor": None, "short_factor": (), "long_factor": ()}
        got, wanted = ours.rope, expected.rope
        np.testing.assert_allclose(got.short_factor, wanted.short_factor, rtol=1e-6)
        np.testing.assert_allclose(got.long_factor, wanted.long_factor, rtol=1e-6)
        ours = msgspec.structs.replace(ours, rope=msgspec.structs.replace(got, **same_rope))
        expected = msgspec.structs.replace(
            expected, rope=msgspec.structs.replace(wanted, **same_rope)
        )
    scale = ours.attention_scale or ours.head_dim**-0.5
    assert scale == pytest.approx(expected.attention_scale or expected.head_dim**-0.5)
    assert ours.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-6)
    same = {
        "attention_scale": expected.attention_scale,
        "rms_norm_eps": expected.rms_norm_eps,
        "weights_format": "safetensors",
    }
    assert msgspec.structs.replace(ours, **same) == expected


def test_real_gguf_files(smollm2_path: Path, gemma3_path: Path) -> None:
    smol = load_spec(smollm2_path)
    assert (smol.architecture, smol.num_layers, smol.num_heads, smol.num_kv_heads) == (
        "llama", 30, 9, 3,
    )  # fmt: skip
    assert (smol.vocab_size, smol.max_position, smol.tie_embeddings) == (49152, 8192, True)
    assert (smol.rope.theta, smol.bos_token_id, smol.eos_token_ids) == (100000.0, 1, (2,))
    gemma = load_spec(gemma3_path)
    assert (gemma.vocab_size, gemma.head_dim, gemma.num_kv_heads) == (262144, 256, 1)
    assert gemma.layer_windows == tuple(0 if i % 6 == 5 else 512 for i in range(18))
    assert (gemma.rope.theta, gemma.rope_sliding) == (1000000.0, RopeSpec())
    assert (gemma.bos_token_id, gemma.eos_token_ids) == (2, (1,))
    assert gemma.embedding_scale == 640**0.5 and gemma.attention_scale == 1 / 16


@pytest.mark.parametrize(
    ("arch", "extra", "words"),
    [
        ("gemma4", {}, r"gemma4 is not supported\. Supported: llama, qwen2, .*nearest: gemma"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
        ("llama", {}, "lacks the tensor token_embd"),
    ],
)
def test_gguf_files_that_are_refused(
    arch: str, extra: dict[str, int], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in extra.items():
        writer.add_uint32(key, value)
    finish_gguf(writer)
    with pytest.raises(ModelError, match=words):
        load_spec(path)


def test_types_of_a_gguf_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """With the config: before a plan is made, or a worker is started."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    kind = gguf.GGMLQuantizationType.IQ3_S
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 110), np.uint8), raw_dtype=kind)
    finish_gguf(writer)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight is quantized as IQ3_S.*Q4_K"):
        load_spec(path)


def test_missing_keys_of_a_gguf_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(512)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    finish_gguf(writer)
    with pytest.raises(ModelError, match="lacks embedding_length, block_count, feed_forward"):
        load_spec(path)


def test_eos_of_gguf_files(tmp_path: Path) -> None:
    def eos(**keys: int) -> tuple[int, ...]:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_context_length(512)
        writer.add_embedding_length(64)
        writer.add_block_count(1)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_token_list(["a", "<|im_end|>", "<|end|>", "b"])
        writer.add_token_types([1, 3, 1, 1])
        for name, value in keys.items():
            if name == "template":
                writer.add_chat_template("<|im_end|> and <|end|>")
            else:
                writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
        writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
        finish_gguf(writer)
        return load_spec(path).eos_token_ids

    assert eos() == ()
    assert eos(eos=0) == (0,)
    assert eos(eos=0, eot=3, eom=0) == (0, 3)
    assert eos(eos=0, template=1) == (0, 1)  # <|end|> is an ordinary token there
    assert eos(eos=4) == ()
