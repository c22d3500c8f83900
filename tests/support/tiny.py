"""Tiny random checkpoints of every family, with a tokenizer, made by transformers' own classes.

    from tiny import tiny_checkpoint, tiny_gguf
    folder = tiny_checkpoint(tmp_path / "m", "qwen3", shards=3, rope="yarn", vocab_size=512)
    file = tiny_gguf(tmp_path / "m.gguf", folder, quant="Q8_0")

A folder is what ``save_pretrained`` writes (config.json, generation_config.json, safetensors) plus
tokenizer.json and tokenizer_config.json with a ChatML template, so it can be served and compared
with ``transformers.AutoModelForCausalLM.from_pretrained(folder)``. All parameters, norms and biases
too, are random and seeded: a family is only right if it uses every one of them.

Families: the keys of FAMILIES, among them llama, mistral (sliding window 24 in all layers), gemma3
(six layers, every third full, window 20, head_dim 32 with hidden 96 and 4 heads, two rope bases),
qwen3_moe (the middle layer is no mixture), smollm3 (the middle layer turns nothing), llama4 (chunks
of 20, every other layer a mixture), and gemma3_multimodal (the same text half in a
Gemma3ForConditionalGeneration).
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
EOS_ID = 2
CONTEXT = 512  # max_position_embeddings
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog says nothing at all.",
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system: once upon a time there was a small model that counted 1, 2, 3, 4.",
]
ROPE = {  # what ``rope=`` puts into the configuration; head_dim decides the factor lists' length
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 8.0},
}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
GEMMA = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
GEMMA2 = {
    **GEMMA,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 4.0,
}
GEMMA4 = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "head_dim": 24,
    "global_head_dim": 32,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,  # fewer: bits would depend on company on a CPU
    "vocab_size_per_layer_input": 320,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    },
}
LLAMA4 = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],  # those that turn nothing see everything
    "head_dim": 24,
    "intermediate_size": 40,
    "intermediate_size_mlp": 96,
    "num_local_experts": 5,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 20,
    "floor_scale": 16,
    "attn_scale": 0.4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        EXPERTS | {"head_dim": 24, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 24}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 20}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "gemma4": ("Gemma4ForCausalLM", GEMMA4),
    "llama4": ("Llama4ForCausalLM", LLAMA4),
    "llama4_multimodal": ("Llama4ForConditionalGeneration", LLAMA4),
    "gemma3_multimodal": ("Gemma3ForConditionalGeneration", GEMMA),
    "gemma4_multimodal": ("Gemma4ForConditionalGeneration", GEMMA4),
}


GGUF_NAMES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
}


def tiny_checkpoint(
    folder: Path | str,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    rope: str | None = None,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint into *folder* and return it.

    shards: about so many safetensors files (1: one file without an index).  rope: a key of ROPE,
    for the full layers.  overrides: keys of the family's transformers configuration, such as
    vocab_size, tie_word_embeddings, attention_bias, use_sliding_window, eos_token_id.
    """
    import torch
    import transformers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    class_name, family_keys = FAMILIES[family]
    encoder = tiny_tokenizer()
    values = {"vocab_size": encoder.get_vocab_size(), **COMMON, **family_keys, **overrides}
    if rope is not None:
        values |= _rope_keys(rope, family, values)
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**_nested(family, values))
    torch.manual_seed(seed)
    model = model_class(config).to(getattr(torch, dtype)).eval()
    _randomize(model, seed)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    biggest = "50GB" if shards == 1 else f"{math.ceil(size / shards / 1000)}KB"
    model.save_pretrained(folder, max_shard_size=biggest)
    if tokenizer:
        write_tokenizer(folder, encoder)
    return folder


def _rope_keys(rope: str, family: str, values: dict[str, Any]) -> dict[str, Any]:
    scaling = {"rope_theta": 10000.0, **ROPE[rope]}
    if rope == "longrope":
        head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        if partial := values.get("partial_rotary_factor"):
            scaling["partial_rotary_factor"] = partial
        places = range(int(head_dim * (partial or 1.0)) // 2)
        scaling["short_factor"] = [1.0 + 0.02 * i for i in places]
        scaling["long_factor"] = [2.0 + 0.5 * i for i in places]
    if not family.startswith("gemma3"):
        return {"rope_parameters": scaling}
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    full = scaling | {"rope_theta": 1000000.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _nested(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """Put the text half of a multimodal configuration where it belongs, beside a tiny eye."""
    if not family.endswith("_multimodal"):
        return values
    if family == "llama4_multimodal":
        vision = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64}
        vision |= {"num_hidden_layers": 1, "image_size": 28, "vision_output_dim": 16}
        vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
        return {"text_config": values, "vision_config": vision}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    if family == "gemma4_multimodal":
        vision |= {"num_key_value_heads": 2, "head_dim": 8}
        ends = {key: values[key] for key in ("eos_token_id", "tie_word_embeddings")}
        text = values | {"pad_token_id": 0}
        return {"text_config": text, "vision_config": vision, "audio_config": None} | ends
    tokens = {"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5}
    shared = {key: values[key] for key in ("eos_token_id", "tie_word_embeddings")}
    return {"text_config": values, "vision_config": vision, "mm_tokens_per_image": 4} | (
        tokens | shared
    )


def _randomize(model: Any, seed: int) -> None:
    """Fill every parameter so that logits spread well and no norm or bias is neutral."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    four = "Gemma4" in type(model).__name__
    gemma = "Gemma" in type(model).__name__ and not four
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight") and "vision" not in name:
                value = 0.2 * noise + (0.0 if gemma else 1.0)
                if four and name.endswith(("q_norm.weight", "k_norm.weight")):
                    value *= 0.5  # its scores are not scaled
            elif "embed_tokens" in name or "lm_head" in name:
                value = 0.3 * noise
            elif name.endswith(("bias", "sinks")):
                value = 0.2 * noise
            else:
                value = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.randn(buffer.shape, generator=generator))


# --------------------------------------------------------------------------------------- tokenizer


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """Return a byte-level BPE tokenizer that encodes any text; SPECIAL_TOKENS are ids 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **config: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json; *config* adds to the latter or changes it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config, indent=1))


# -------------------------------------------------------------------------------------------- GGUF


def tiny_gguf(
    path: Path | str, folder: Path, *, quant: str = "F32", pooling: str | None = None
) -> Path:
    """Write the one-file checkpoint in *folder* as a GGUF file, as converters do, and return it.

    quant: F32 or Q8_0 (matrices whose rows are whole blocks of 32; the rest stays F32). Of the
    Llama family the rows of q and k are interleaved, Gemma's norms are stored plus one, experts of
    a layer are one tensor. A GGUF file has no query_pre_attn_scalar: for Gemma make the folder with
    it equal to head_dim (32); and SmolLM3 always has a still layer after three that turn.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    family = GGUF_NAMES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(path), family)
    _write_metadata(writer, config, family)
    if pooling is not None:  # the name of a gguf.PoolingType: it is an embedder
        writer.add_pooling_type(gguf.PoolingType[pooling])
    if (folder / "tokenizer.json").is_file():
        _write_vocabulary(writer, folder)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), 99)
    for name, tensor in _stacked(load_file(folder / "model.safetensors")).items():
        array = _converted(name, tensor.astype(np.float32), config, family)
        kind = gguf.GGMLQuantizationType.F32
        if quant == "Q8_0" and array.ndim >= 2 and array.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, gguf.quantize(array, kind), raw_dtype=kind)
    if config["rope_parameters"].get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    finish_gguf(writer)
    return Path(path)


def finish_gguf(writer: Any) -> None:
    """Write what *writer* was given into its file, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: Any, config: dict[str, Any], family: str) -> None:
    import gguf

    heads = config["num_attention_heads"]
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(full["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        original = full["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for kind in ("long", "short"):
            factors = np.array(full[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if family in ("gemma2", "gemma3", "olmo2", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if family in ("gemma3", "olmo2") and "layer_types" in config:
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(slides)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    _write_experts(writer, config)


def _write_experts(writer: Any, config: dict[str, Any]) -> None:
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        size = config["shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(size)


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put the experts of a layer together, under the names that the gguf package knows."""
    found: dict[str, Any] = {}
    for name in sorted(tensors, key=lambda n: [int(p) if p.isdigit() else p for p in n.split(".")]):
        common = name.replace("block_sparse_moe", "mlp")
        for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            common = common.replace(f".{theirs}.", f".{ours}.")
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", common)
        if match:
            found.setdefault(f"{match[1]}.{match[2]}", []).append(tensors[name])
        else:
            found[common] = tensors[name]
    return {n: np.stack(v) if isinstance(v, list) else v for n, v in found.items()}


def _write_vocabulary(writer: Any, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in content["added_tokens"]}
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    merges = content["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _converted(name: str, array: np.ndarray, config: dict[str, Any], family: str) -> np.ndarray:
    if family in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return array + 1.0
    if name.endswith("shared_expert_gate.weight"):
        return array[0]
    if family not in ("llama", "smollm3"):
        return array
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            halves = array.reshape(config[key], 2, -1, *array.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    return array


def llama3_divisors(config: dict[str, Any]) -> np.ndarray:
    """Return float32 divisors of the rotary frequencies, as converters store Llama 3's scaling."""
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    context = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
