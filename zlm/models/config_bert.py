"""ModelSpec of BERT's family from its config.json: encoders with learned positions.

Knows BERT, RoBERTa and XLM-RoBERTa, as bare encoders and with a classification head. They are one
architecture: they differ in where positions begin, in names of tensors, and in the head.
"""

import msgspec

from zlm.config import DenseSpec, ModelSpec, PoolingSpec
from zlm.errors import ModelError
from zlm.models.config_fields import Fields
from zlm.models.config_pooling import classifier, num_labels

ROBERTA = ("roberta", "xlm-roberta")
ARCHITECTURES = {  # whether there is a classification head
    "BertModel": False,
    "BertForMaskedLM": False,
    "BertForSequenceClassification": True,
    "RobertaModel": False,
    "RobertaForMaskedLM": False,
    "RobertaForSequenceClassification": True,
    "XLMRobertaModel": False,
    "XLMRobertaForMaskedLM": False,
    "XLMRobertaForSequenceClassification": True,
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def bert_spec(config: Fields, name: str) -> ModelSpec:
    """Return the facts of architecture *name* that *config* describes, without its tokens.

    Raises ModelError, naming the key, for what is missing or not supported.
    """
    config.require(["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
    config.require(["intermediate_size"])
    hidden, heads = config.integer("hidden_size", 0), config.integer("num_attention_heads", 0)
    if hidden % heads:
        raise ModelError(
            f"{config.source}: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        )
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(f"{config.source}: position_embedding_type {kind} is not supported")
    activation = config.text("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"{config.source}: activation {activation} is not supported")
    is_roberta = "oberta" in name or config.text("model_type", "") in ROBERTA
    offset = config.integer("pad_token_id", 1, least=0) + 1 if is_roberta else 0
    rows = config.integer("max_position_embeddings", 512)
    if rows <= offset:
        raise config.wrong("max_position_embeddings", f"greater than {offset}")
    spec = ModelSpec(
        architecture="bert",
        vocab_size=config.integer("vocab_size", 0),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 0),
        num_layers=config.integer("num_hidden_layers", 0),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=rows - offset,
        rms_norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=ACTIVATIONS[activation],
        bidirectional=True,
        can_generate=False,
        position_offset=offset,
        token_types=config.integer("type_vocab_size", 2, least=0),
        pooling=PoolingSpec(kind="mean"),
    )
    return spec if not ARCHITECTURES.get(name, False) else _with_head(spec, config, is_roberta)


def _with_head(spec: ModelSpec, config: Fields, is_roberta: bool) -> ModelSpec:
    inner, outer = ("classifier.dense", "classifier.out_proj")
    if not is_roberta:
        inner, outer = ("pooler.dense", "classifier")
    hidden = spec.hidden_size
    dense = [
        DenseSpec(name=inner, in_features=hidden, out_features=hidden, activation="tanh"),
        DenseSpec(name=outer, in_features=hidden, out_features=num_labels(config)),
    ]
    return msgspec.structs.replace(spec, pooling=classifier(config, dense, "cls"))
