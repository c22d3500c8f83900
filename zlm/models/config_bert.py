"""ModelSpec of BERT's family from its config.json: encoders with learned positions.

Knows BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and MPNet. They are one architecture: they
differ in where positions begin, in segments, and in names of tensors and keys.
"""

from zlm.config import ModelSpec
from zlm.errors import ModelError
from zlm.models.config_fields import Fields

ROBERTA = ("roberta", "xlm-roberta", "camembert")
MPNET_OFFSET = 2  # whatever its padding token
DISTILBERT_KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "activation": "hidden_act",
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def bert_spec(config: Fields, name: str) -> ModelSpec:
    """Return the facts of architecture *name* that *config* describes, without tokens and head.

    Raises ModelError, naming the key, for what is missing or not supported.
    """
    model_type = config.text("model_type", "")
    distilled = name.startswith("DistilBert") or model_type == "distilbert"
    if distilled:
        values = {DISTILBERT_KEYS.get(key, key): value for key, value in config.values.items()}
        config = Fields(values, config.source)
    config.require(["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
    config.require(["intermediate_size"])
    hidden, heads = config.integer("hidden_size", 0), config.integer("num_attention_heads", 0)
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(f"{config.source}: position_embedding_type {kind} is not supported")
    activation = config.text("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"{config.source}: activation {activation} is not supported")
    is_roberta = "oberta" in name or "Camembert" in name or model_type in ROBERTA
    is_mpnet = name.startswith("MPNet") or model_type == "mpnet"
    offset = config.integer("pad_token_id", 1, least=0) + 1 if is_roberta else 0
    offset = MPNET_OFFSET if is_mpnet else offset
    rows = config.integer("max_position_embeddings", 512)
    if rows <= offset:
        raise config.wrong("max_position_embeddings", f"greater than {offset}")
    return ModelSpec(
        architecture="bert",
        vocab_size=config.integer("vocab_size", 0),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 0),
        num_layers=config.integer("num_hidden_layers", 0),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim(config, hidden, heads),
        max_position=rows - offset,
        rms_norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=ACTIVATIONS[activation],
        bidirectional=True,
        can_generate=False,
        position_offset=offset,
        token_types=0 if distilled or is_mpnet else config.integer("type_vocab_size", 2, least=0),
        relative_buckets=config.integer("relative_attention_num_buckets", 32) if is_mpnet else 0,
    )


def head_dim(config: Fields, hidden: int, heads: int) -> int:
    """Return the size of a head; raise ModelError if the heads do not share *hidden* evenly."""
    if hidden % heads:
        raise ModelError(
            f"{config.source}: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        )
    return hidden // heads
