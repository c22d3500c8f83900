"""Names of tensors: every checkpoint's, brought to those of a Hugging Face text model.

The common form is ``model.embed_tokens.weight``, ``model.layers.0.self_attn.q_proj.weight``, ...,
``model.norm.weight``, ``lm_head.weight``. A name that is not known here stays as it is, so that
whoever builds the model can name it as unexpected. No torch.
"""

import re
from collections.abc import Iterable

# GGUF's names of what stands outside the layers, and within a layer (before .weight or .bias).
GGUF_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_SANDWICH = {  # Gemma: norms on both sides of attention and MLP
    "ffn_norm": "pre_feedforward_layernorm",
}
GGUF_FUSED = {"ffn_up": "mlp.gate_up_proj"}  # Phi-3: gate and up in one
GGUF_FREQUENCIES = (  # facts of the rotary embedding: part of the ModelSpec, no weights
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_GGUF_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Prefixes of the text half in multimodal checkpoints, old and new, and of the other half.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_HALF = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
)
# Mixtral's and Llama 4's own names for a mixture of experts.
_LLAMA4 = {".feed_forward.router.": ".mlp.gate.", ".feed_forward.": ".mlp."}
_MIXTRAL = {
    "block_sparse_moe.gate.": "mlp.gate.",
    "block_sparse_moe.experts.": "mlp.experts.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
_BARE = ("embed_tokens.", "layers.", "norm.")  # a checkpoint of the model without its head
_COMPUTED = ".rotary_emb.inv_freq"  # a table that old checkpoints store and nobody reads


def gguf_names(names: Iterable[str], *, sandwich: bool, fused: bool) -> dict[str, str]:
    """Return our name to the file's name for the tensors of a GGUF file that are weights.

    sandwich, fused: the facts ``sandwich_norms`` and ``fused_products`` of its ModelSpec.
    """
    layer = GGUF_LAYER
    if sandwich:
        layer = layer | GGUF_SANDWICH
    if fused:
        layer = layer | GGUF_FUSED
    found = {}
    for name in names:
        if name in GGUF_FREQUENCIES:
            continue
        match = _GGUF_NAME.fullmatch(name)
        if match and match[2] in layer:
            found[f"model.layers.{match[1]}.{layer[match[2]]}.{match[3]}"] = name
        else:
            found[GGUF_OUTER.get(name, name)] = name
    return found


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return our name to the file's name for the text weights of a Hugging Face checkpoint."""
    found = {}
    for name in names:
        if name.startswith(_OTHER_HALF) or name.endswith(_COMPUTED):
            continue
        ours = f"model.{name}" if name.startswith(_BARE) else name
        for prefix, replacement in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                ours = replacement + name.removeprefix(prefix)
        for theirs, common in (_MIXTRAL if ".block_sparse_moe." in ours else _LLAMA4).items():
            ours = ours.replace(theirs, common)
        found[ours] = name
    return found
