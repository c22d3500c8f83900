"""load_spec of folders: what a config.json means, compared with transformers."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from config_files import LLAMA, spec_of, write
from tiny import CONTEXT, FAMILIES, ROPE, tiny_checkpoint

from zlm.config import ModelSpec, RopeSpec
from zlm.errors import ModelError
from zlm.models.config import load_spec

WITH_QK_NORM = ("qwen3", "qwen3_moe", "gemma3", "gemma4", "olmo2", "olmo3")

# ---------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_by_transformers(family: str, tmp_path: Path) -> None:
    """A folder of transformers 5 means the same to us as to transformers."""
    from transformers import AutoConfig

    folder = tiny_checkpoint(tmp_path, family)
    theirs = AutoConfig.from_pretrained(folder).get_text_config()
    ours = load_spec(folder)
    assert ours.architecture == family.removesuffix("_multimodal")
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    inner = getattr(theirs, "intermediate_size_mlp", theirs.intermediate_size)
    assert ours.intermediate_size == inner
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    if ours.gemma4 is not None:  # whose layers differ
        assert ours.gemma4.full_head_dim == 32
        theirs = theirs.per_layer_config[0]
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (2,)
    assert ours.bos_token_id is None
    assert ours.checkpoint_dtype == "float32"
    assert ours.weights_format == "safetensors"
    types = getattr(theirs, "layer_types", None)
    if family in ("mistral", "phi3"):
        assert ours.layer_windows == (24,) * 3
    elif types:
        spans = {"sliding_attention": 20, "chunked_attention": -20, "full_attention": 0}
        assert list(ours.layer_windows) == [spans[kind] for kind in types]
    assert ours.qkv_bias == (family in ("qwen2", "qwen2_moe", "gpt_oss"))
    assert ours.qk_norm == (ours.architecture in WITH_QK_NORM)


def test_gemma_facts(tmp_path: Path) -> None:
    ours = load_spec(tiny_checkpoint(tmp_path, "gemma3", final_logit_softcapping=30.0))
    assert ours.norm_plus_one and ours.sandwich_norms and ours.qk_norm
    assert ours.activation == "gelu_tanh"
    assert ours.embedding_scale == 96**0.5
    assert ours.attention_scale == 24**-0.5
    assert (ours.attention_softcap, ours.final_softcap) == (0.0, 30.0)
    assert ours.rope == RopeSpec(theta=1000000.0)
    assert ours.rope_sliding == RopeSpec(theta=10000.0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("rope", ROPE)
def test_rope_scaling_saved_by_transformers(family: str, rope: str, tmp_path: Path) -> None:
    """The frequencies that follow from the RopeSpec are those of transformers."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = tiny_checkpoint(tmp_path, family, rope=rope)
    theirs = AutoConfig.from_pretrained(folder)
    layer_type = {"layer_type": "full_attention"} if family == "gemma3" else {}
    ours = load_spec(folder)
    assert ours.rope.scaling == rope
    assert ours.rope_sliding == (RopeSpec() if family == "gemma3" else None)
    lengths = (None, CONTEXT) if rope == "longrope" else (None,)
    for length in lengths:
        function = ROPE_INIT_FUNCTIONS[rope]
        frequencies, factor = function(theirs, seq_len=length, **layer_type)
        expected = frequencies.tolist(), factor
        got = rope_of(ours.rope, ours.head_dim, length)
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
        assert got[1] == pytest.approx(expected[1], rel=1e-9)


def rope_of(rope: RopeSpec, head_dim: int, length: int | None) -> tuple[np.ndarray, float]:
    """Compute frequencies and attention factor from the fields, straight from the papers."""
    places = np.arange(0, head_dim, 2) / head_dim
    plain = rope.theta**-places
    if rope.scaling == "linear":
        return plain / rope.factor, 1.0
    if rope.scaling == "longrope":
        long = length is not None and length > rope.original_max_position
        factors = np.array(rope.long_factor if long else rope.short_factor)
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
        return plain / factors, scale
    if rope.scaling == "llama3":
        turns = rope.original_max_position * plain / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return plain * ((1 - kept) / rope.factor + kept), 1.0
    assert rope.scaling == "yarn"
    edges = [
        head_dim
        * math.log(rope.original_max_position / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    ]
    low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (ramp / rope.factor + 1 - ramp), 0.1 * math.log(rope.factor) + 1


def test_qwen_sliding_windows(tmp_path: Path) -> None:
    """use_sliding_window and max_window_layers as transformers reads them, with and without."""
    keys = {"sliding_window": 16, "max_window_layers": 2, "num_hidden_layers": 4}
    for family in ("qwen2", "qwen3"):
        off = tiny_checkpoint(tmp_path / f"{family}-off", family, use_sliding_window=False, **keys)
        assert load_spec(off).layer_windows == (0, 0, 0, 0)
        on = tiny_checkpoint(tmp_path / f"{family}-on", family, use_sliding_window=True, **keys)
        assert load_spec(on).layer_windows == (0, 0, 16, 16)
        config = json.loads((on / "config.json").read_text())
        del config["layer_types"]
        write(on, "config.json", config)
        assert load_spec(on).layer_windows == (0, 0, 16, 16)


def test_biases(tmp_path: Path) -> None:
    plain = spec_of(tmp_path)
    assert not (plain.qkv_bias or plain.o_bias or plain.mlp_bias)
    both = spec_of(tmp_path, attention_bias=True, mlp_bias=True)
    assert both.qkv_bias and both.o_bias and both.mlp_bias
    qwen2 = spec_of(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert qwen2.qkv_bias and not qwen2.o_bias
    qwen3 = spec_of(tmp_path, architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert qwen3.qkv_bias and qwen3.o_bias


# ------------------------------------------------------------------------------ older config.json


def test_published_gemma3_multimodal(tmp_path: Path) -> None:
    """The sparse text_config of Gemma 3 4B, as published, means what transformers fills in."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    write(tmp_path, "config.json", config)
    ours = load_spec(tmp_path)
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads) == (262208, 8, 4)
    assert (ours.head_dim, ours.max_position) == (256, 131072)
    assert ours.tie_embeddings
    assert ours.rope == RopeSpec(theta=1000000.0, scaling="linear", factor=8.0)
    assert ours.rope_sliding == RopeSpec(theta=10000.0)
    assert ours.layer_windows == tuple(0 if i % 6 == 5 else 1024 for i in range(34))
    assert ours.attention_scale == 1 / 16
    assert ours.eos_token_ids == (1, 106)
    assert ours.bos_token_id == 2
    assert ours.checkpoint_dtype == "bfloat16"


def test_published_gemma3_text(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "_sliding_window_pattern": 3,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rope_theta": 500000.0,
        "rope_local_base_freq": 20000.0,
        "sliding_window": 512,
        "dtype": "bfloat16",
    }
    write(tmp_path, "config.json", config)
    ours = load_spec(tmp_path)
    assert ours.layer_windows == (512, 512, 0, 512, 512, 0)
    assert (ours.rope.theta, ours.rope_sliding) == (500000.0, RopeSpec(theta=20000.0))
    write(tmp_path, "config.json", config | {"use_bidirectional_attention": True})
    embedder = load_spec(tmp_path)
    assert embedder.bidirectional and not embedder.can_generate
    assert embedder.layer_windows == (257, 257, 0, 257, 257, 0)  # to either side, itself included


def test_mistral_windows_absent_null_and_given(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert spec_of(tmp_path, **mistral).layer_windows == (4096,) * 4
    assert spec_of(tmp_path, **mistral).max_position == 131072
    write(tmp_path, "config.json", LLAMA | mistral | {"sliding_window": None})
    assert load_spec(tmp_path).layer_windows == (0,) * 4
    whole = {"sliding_window": 4096, "max_position_embeddings": 4096}
    assert spec_of(tmp_path, **mistral, **whole).layer_windows == (0,) * 4


def test_key_value_heads_absent_and_null(tmp_path: Path) -> None:
    absent: dict[str, Any] = {"num_key_value_heads": None}
    assert spec_of(tmp_path, **absent).num_kv_heads == 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 64, "hidden_size": 512}
    assert spec_of(tmp_path, **qwen, **absent).num_kv_heads == 32
    write(tmp_path, "config.json", LLAMA | qwen | absent)
    assert load_spec(tmp_path).num_kv_heads == 64


def test_old_rope_spellings(tmp_path: Path) -> None:
    """``type`` for ``rope_type``, ``su`` for longrope, and lengths outside the dictionary."""
    linear = spec_of(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope == RopeSpec(theta=5e5, scaling="linear", factor=2.0)
    llama3 = ROPE["llama3"] | {"original_max_position_embeddings": None}
    scaled = spec_of(tmp_path, rope_scaling=llama3, max_position_embeddings=4096)
    assert scaled.rope.original_max_position == 4096
    factors = {"short_factor": [1.0] * 8, "long_factor": [2] * 8}
    su = spec_of(
        tmp_path,
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=64,
        max_position_embeddings=1024,
    )
    assert su.rope.scaling == "longrope"
    assert (su.rope.original_max_position, su.rope.factor) == (64, 16.0)
    assert su.rope.short_factor == (1.0,) * 8 and su.rope.long_factor == (2.0,) * 8
    assert su.max_position == 1024


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    by_hand = spec_of(tmp_path, rope_scaling=yarn, max_position_embeddings=128)
    assert by_hand.max_position == 512
    named = spec_of(tmp_path, rope_scaling=yarn, max_position_embeddings=512)
    assert named.max_position == 512


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"'dynamic' is not supported \(known: linear"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a number greater than 0"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_type": "yarn"}, "lacks factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "long_factor must be a list of numbers"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]},
            "long_factor has 1 entries, 8 are needed",
        ),
        ({"rope_type": 3}, "rope_type must be a string"),
        ([1], "rope_scaling must be an object"),
    ],
)
def test_rope_scaling_that_cannot_be_used(tmp_path: Path, scaling: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, rope_scaling=scaling)


# ------------------------------------------------------------------------------- what is refused


def test_unknown_architectures_name_the_known(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"Qwen3NextForCausalLM is not .*nearest: Qwen3ForCausalLM"
    ):
        spec_of(tmp_path, architectures=["Qwen3NextForCausalLM"])
    with pytest.raises(ModelError, match="LlamaForCausalLM, MistralForCausalLM, "):
        spec_of(tmp_path, architectures=["T5EncoderModel"])
    with pytest.raises(ModelError, match="names no architecture"):
        spec_of(tmp_path, architectures=None)
    assert spec_of(tmp_path, architectures=None, model_type="qwen3").architecture == "qwen3"
    with pytest.raises(ModelError, match="mamba is not supported"):
        spec_of(tmp_path, architectures=None, model_type="mamba")


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json lacks hidden_size, vocab_size$"):
        spec_of(tmp_path, hidden_size=None, vocab_size=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "66 is no multiple of num_attention_heads 4"),
        ({"head_dim": 15}, "an even number is needed"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number greater than 0"),
        ({"hidden_act": "relu"}, "activation relu is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id, a list of them, or null"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True,
             "sliding_window": 8, "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types must be 4 times full_attention or sliding_attention",
        ),
    ],
)  # fmt: skip
def test_wrong_values_name_their_key(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{words}"):
        spec_of(tmp_path, **changes)


def compressed(rotated: str = "weight_input", **group: dict) -> dict:
    """Return a config of compressed-tensors with one *group* and a rotation of *rotated*."""
    apply = [{"targets": ["Linear"], "location": rotated}]
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}},
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits 3 is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}},
            "checkpoint_format marlin is not supported",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "version": "GEMV"}},
            "version gemv is not supported",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq method, which is not supported"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4"}},
            "format nvfp4 is not supported",
        ),
        ({"quantization": {"group_size": 64, "bits": 8}}, r"the unnamed method \(8-bit\)"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            r"quant_algo NVFP4 is not supported \(supported: FP8\)",
        ),
        (
            {"quantization_config": compressed(weights={"num_bits": 3, "type": "int"})},
            r"group_0, weights: num_bits 3 is not supported \(supported: 4, 8\)",
        ),
        (
            {"quantization_config": compressed(rotated="input")},
            "transform_config, config_groups: R1 rotates more than weights",
        ),
    ],
)
def test_quantized_checkpoints_are_refused(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, **changes)


def test_rotations_that_the_weights_have_in_them(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, quantization_config=compressed(rotated="weight_output"))
    assert spec.quantization == "compressed-tensors"


def test_modelopt_stores_fp8_as_others_do(tmp_path: Path) -> None:
    """It says so in config.json, or in older checkpoints in a file of its own alone."""
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    spec = spec_of(tmp_path, quantization_config=config)
    assert (spec.quantization, spec.static_inputs) == ("fp8", True)
    for algorithm, expected in (("FP8", ("fp8", True)), (None, (None, False))):
        own = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
        write(tmp_path, "hf_quant_config.json", {"quantization": own})
        spec = spec_of(tmp_path)
        assert (spec.quantization, spec.static_inputs) == expected
        assert spec.kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_how_a_scheme_rounds_activations(tmp_path: Path, scheme: str) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": scheme}
    assert spec_of(tmp_path, quantization_config=fp8).static_inputs == (scheme == "static")


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        load_spec(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_spec(tmp_path)
    write(tmp_path, "adapter_config.json", {"base_model_name_or_path": "owner/base"})
    with pytest.raises(ModelError, match="an adapter for owner/base"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        load_spec(tmp_path)


def test_dtype_from_the_weights_when_the_config_is_silent(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    write(folder, "config.json", config)
    assert load_spec(folder).checkpoint_dtype == "bfloat16"


def test_a_spec_crosses_processes_unchanged(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "gemma3", rope="longrope")
    spec = load_spec(folder)
    packed = msgspec.msgpack.encode(spec)
    assert msgspec.msgpack.decode(packed, type=ModelSpec) == spec
