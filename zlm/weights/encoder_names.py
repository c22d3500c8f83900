"""Names of the tensors of encoders: every checkpoint's, brought to one form an architecture.

The common forms are those of ``zlm.models.tensors_encoder``. A name that is not known here stays as
it is, so that whoever builds the model can name it as unexpected. No torch.
"""

import re
from collections.abc import Iterable

# Prefixes of the whole encoder in checkpoints that hold it with a head.
_PREFIXES = ("bert.", "roberta.", "distilbert.", "mpnet.", "nomic_bert.", "model.")
_OLD_NORMS = {".gamma": ".weight", ".beta": ".bias"}  # of BERT's first checkpoints

_DISTILBERT = {
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
_MPNET = {
    "attention.attn.q": "attention.self.query",
    "attention.attn.k": "attention.self.key",
    "attention.attn.v": "attention.self.value",
    "attention.attn.o": "attention.output.dense",
    "attention.LayerNorm": "attention.output.LayerNorm",
}
_MODERNBERT = {"attn.Wqkv": "self_attn.qkv_proj", "attn.Wo": "self_attn.o_proj"}
_NOMIC = {  # the names that its own code gave it
    "attn.Wqkv": "self_attn.qkv_proj",
    "attn.out_proj": "self_attn.o_proj",
    "mlp.fc11": "mlp.up_proj",
    "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}
# By architecture: where a checkpoint's layers stand, where ours do, and names within a layer.
_LAYERS = {
    "bert": ("transformer.layer", "encoder.layer", _DISTILBERT | _MPNET),
    "modernbert": ("layers", "layers", _MODERNBERT),
    "nomic_bert": ("encoder.layers", "layers", _NOMIC),
}
_LAYER = re.compile(r"(.+?)\.(\d+)\.(.+)\.(weight|bias)")

# GGUF's names of what stands outside the layers, and within a layer (before .weight or .bias).
_GGUF_OUTER = {
    "bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "cls": "classifier.dense",
        "cls.output": "classifier.out_proj",
    },
    "modernbert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
    "nomic_bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    },
}
_GGUF_LAYER = {
    "bert": {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    "modernbert": {
        "attn_norm": "attn_norm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    "nomic_bert": {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_output_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "layer_output_norm": "post_mlp_layernorm",
    },
}
_GGUF_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

ENCODERS = tuple(_LAYERS)


def encoder_names(names: Iterable[str], architecture: str) -> dict[str, str]:
    """Return our name to the file's name for the tensors of a Hugging Face checkpoint."""
    return {_encoder_name(name, architecture): name for name in names}


def gguf_encoder_names(names: Iterable[str], architecture: str) -> dict[str, str]:
    """Return our name to the file's name for the tensors of a GGUF file."""
    outer, layer = _GGUF_OUTER[architecture], _GGUF_LAYER[architecture]
    found = {}
    for name in names:
        match = _GGUF_NAME.fullmatch(name)
        stem, _, kind = name.rpartition(".")
        if match and match[2] in layer:
            ours = f"{_LAYERS[architecture][1]}.{match[1]}.{layer[match[2]]}.{match[3]}"
        else:
            ours = f"{outer[stem]}.{kind}" if stem in outer else name
        found[ours] = name
    return found


def _encoder_name(name: str, architecture: str) -> str:
    ours = name
    for prefix in _PREFIXES:
        ours = ours.removeprefix(prefix)
    for old, new in _OLD_NORMS.items():
        if ours.endswith(old):
            ours = ours.removesuffix(old) + new
    if architecture == "nomic_bert" and ours.startswith("emb_ln."):
        return ours.replace("emb_ln.", "embeddings.LayerNorm.", 1)
    theirs, place, within = _LAYERS[architecture]
    match = _LAYER.fullmatch(ours)
    if match is None or match[1] not in (theirs, place):
        return ours
    return f"{place}.{match[2]}.{within.get(match[3], match[3])}.{match[4]}"
