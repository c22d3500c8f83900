"""Facts that single families have of their own, from hand-written config.json files."""

from pathlib import Path
from typing import Any

import pytest
from config_files import spec_of, write

from zlm.config import ExpertsSpec, Gemma4Spec, RopeSpec, kv_groups
from zlm.errors import ModelError
from zlm.models.config import load_spec


def test_mixtral(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, architectures=["MixtralForCausalLM"])
    assert spec.experts == ExpertsSpec(count=8, chosen=2, size=96)
    assert (spec.rope.theta, spec.rms_norm_eps, spec.layer_windows) == (1e6, 1e-5, (0,) * 4)


def test_qwen_mixtures(tmp_path: Path) -> None:
    """Which layers are mixtures, and whether shares are normalized, which they are not unasked."""
    qwen3 = spec_of(
        tmp_path,
        architectures=["Qwen3MoeForCausalLM"],
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        moe_intermediate_size=24,
        norm_topk_prob=True,
    )
    layers = (False, True, False, False)
    assert qwen3.experts == ExpertsSpec(count=128, chosen=8, size=24, layers=layers)
    assert qwen3.qk_norm and not qwen3.qkv_bias
    qwen2 = spec_of(tmp_path, architectures=["Qwen2MoeForCausalLM"], num_experts=4)
    assert qwen2.experts is not None and not qwen2.experts.normalize
    assert (qwen2.experts.shared_size, qwen2.experts.size) == (5632, 1408)
    assert qwen2.qkv_bias and not qwen2.qk_norm


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers must be 4 times 0 or 1"),
        ("Gemma4ForCausalLM", {"enable_moe_block": True}, "enable_moe_block, .* is not supported"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "all is not supported"),
        (
            "Gemma4ForCausalLM",
            {"vocab_size_per_layer_input": 9},
            "must be vocab_size, which is 320",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{words}"):
        spec_of(tmp_path, architectures=[architecture], **changes)


def test_text_halves_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Mistral's multimodal architecture has had text halves of more than one model."""
    text = {
        "model_type": "mistral",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    write(tmp_path, "config.json", config)
    assert load_spec(tmp_path).architecture == "mistral"
    text["model_type"] = "ministral3"
    write(tmp_path, "config.json", config)
    with pytest.raises(ModelError, match="text half of model_type ministral3 is not supported"):
        load_spec(tmp_path)


def test_gemma2_softcaps_absent_null_and_given(tmp_path: Path) -> None:
    gemma2: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 32}
    absent = spec_of(tmp_path, **gemma2)
    assert (absent.attention_softcap, absent.final_softcap) == (50.0, 30.0)
    assert absent.layer_windows == (32, 0, 32, 0)
    values = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    gemma2["torch_dtype"] = "float32"
    null = {"attn_logit_softcapping": None, "final_logit_softcapping": 20}
    write(tmp_path, "config.json", gemma2 | values | null)
    spec = load_spec(tmp_path)
    assert (spec.attention_softcap, spec.final_softcap) == (0.0, 20.0)


def test_smollm3_still_layers(tmp_path: Path) -> None:
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"]}
    assert spec_of(tmp_path, **smollm3).rope_layers == (True, True, True, False)
    given = spec_of(tmp_path, **smollm3, no_rope_layers=[0, 1, 1, 1, 1])
    assert given.rope_layers == (False, True, True, True)
    slides = {"use_sliding_window": True, "sliding_window": 16}
    assert spec_of(tmp_path, **smollm3, **slides).layer_windows == (0, 0, 0, 16)


def test_llama4_layers(tmp_path: Path) -> None:
    llama4 = {"architectures": ["Llama4ForCausalLM"], "torch_dtype": "float32"}
    spec = spec_of(tmp_path, **llama4, no_rope_layers=[], interleave_moe_layer_step=2)
    assert spec.rope_layers == (True, True, True, False)
    assert spec.layer_windows == (-8192, -8192, -8192, 0)
    assert spec.experts is not None and spec.experts.layers == (False, True, False, True)
    assert (spec.intermediate_size, spec.experts.size, spec.experts.shared_size) == (16384, 96, 96)
    assert spec.rope_still is not None and spec.rope_still.original_max_position == 8192
    own = {"attn_temperature_tuning": 0, "moe_layers": [], "attention_chunk_size": 200000}
    plain = spec_of(tmp_path, **llama4, **own)
    assert plain.rope_still is None and plain.experts is None
    assert plain.layer_windows == (0,) * 4, "a chunk as long as the context is no limit"
    kinds = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(ModelError, match="4 times full_attention or chunked_attention"):
        spec_of(tmp_path, **llama4, layer_types=kinds)


def test_olmo3_scales_its_full_layers_alone(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
    spec = spec_of(
        tmp_path,
        architectures=["Olmo3ForCausalLM"],
        rope_theta=5e5,
        rope_scaling=scaling,
        max_position_embeddings=2048,
        sliding_window=128,
    )
    assert (spec.rope.scaling, spec.rope_sliding) == ("yarn", RopeSpec(theta=5e5))
    assert spec.layer_windows == (128, 128, 128, 0)


def test_gpt_oss_without_a_rope(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, architectures=["GptOssForCausalLM"], num_local_experts=32)
    assert spec.rope == RopeSpec(
        theta=150000.0, scaling="yarn", factor=32.0, original_max_position=4096, truncate=False
    )
    assert spec.layer_windows == (128, 0, 128, 0) and spec.attention_sinks
    assert spec.experts == ExpertsSpec(
        count=32, chosen=4, size=96, layout="fused", biases=True, limit=7.0, alpha=1.702
    )


def test_gemma4(tmp_path: Path) -> None:
    """Full layers have heads of their own, the last layers no cache: as older files say it."""
    spec = spec_of(
        tmp_path,
        architectures=["Gemma4ForCausalLM"],
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        vocab_size_per_layer_input=320,
        head_dim=32,
    )
    assert spec.gemma4 == Gemma4Spec(
        full_head_dim=512,
        full_kv_heads=1,
        keys_are_values=True,
        shared_layers=2,
        per_layer_size=256,
    )
    full, sliding = kv_groups(spec)
    assert (full.layers, full.num_kv_heads, full.head_dim) == ((1, 3), 1, 512)
    assert (sliding.layers, sliding.num_kv_heads, sliding.head_dim) == ((0, 2), 2, 32)
    assert spec.rope == RopeSpec(theta=1e6, scaling="proportional", partial_factor=0.25)
    assert spec.rope_sliding == RopeSpec(theta=1e4) and spec.attention_scale == 1.0
