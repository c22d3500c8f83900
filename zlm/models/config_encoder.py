"""ModelSpec of an encoder from its config.json: which family, with which head.

Classes are named as transformers names them, ``RobertaForSequenceClassification``: a family, and
what stands on it. ``config_bert`` knows BERT's family, ``config_rotary_encoder`` the encoders with
rotary positions; what a classification head is made of is here, for all of them.
"""

from pathlib import Path

import msgspec

from zlm.config import DenseSpec, ModelSpec
from zlm.models import config_bert, config_rotary_encoder
from zlm.models.config_fields import Fields
from zlm.models.config_pooling import classifier, num_labels

_FAMILIES = {  # by transformers' prefix: our architecture
    "Bert": "bert",
    "Camembert": "bert",
    "DistilBert": "bert",
    "MPNet": "bert",
    "ModernBert": "modernbert",
    "NomicBert": "nomic_bert",
    "Roberta": "bert",
    "XLMRoberta": "bert",
}
FAMILIES = frozenset(_FAMILIES.values())
_TEXTS, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
ARCHITECTURES = {
    f"{prefix}{suffix}": family
    for prefix, family in _FAMILIES.items()
    for suffix in ("Model", "ForMaskedLM", _TEXTS, _TOKENS)
}
MODEL_TYPES = {  # for a config.json without ``architectures``
    "bert": "bert",
    "camembert": "bert",
    "distilbert": "bert",
    "modernbert": "modernbert",
    "mpnet": "bert",
    "nomic_bert": "nomic_bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
}


def encoder_spec(config: Fields, family: str, name: str, folder: Path) -> ModelSpec:
    """Return the facts of architecture *name*, of *family*, that *config* describes.

    Without its tokens. Raises ModelError, naming the key, for what is missing or not supported.
    """
    if family == "modernbert":
        spec = config_rotary_encoder.modernbert_spec(config)
    elif family == "nomic_bert":
        spec = config_rotary_encoder.nomic_bert_spec(config, folder)
    else:
        spec = config_bert.bert_spec(config, name)
    if not name.endswith((_TEXTS, _TOKENS)):
        return spec
    by_token = name.endswith(_TOKENS)
    dense = _head(spec, config, name, by_token=by_token)
    kind = "tokens" if by_token else "cls"
    if family == "modernbert" and not by_token:
        kind = config.text("classifier_pooling", "cls")
        if kind not in ("cls", "mean"):
            raise config.wrong("classifier_pooling", "cls or mean")
    return msgspec.structs.replace(spec, pooling=classifier(config, dense, kind))


def _head(spec: ModelSpec, config: Fields, name: str, *, by_token: bool) -> list[DenseSpec]:
    """Return the dense layers of a classification head, the last for the labels."""
    hidden = spec.hidden_size
    inner, outer, activation = "pooler.dense", "classifier", "tanh"
    if spec.architecture == "modernbert":
        return _modernbert_head(spec, config)
    if name.startswith("DistilBert"):
        inner, activation = "pre_classifier", "relu"
    elif "oberta" in name or name.startswith(("Camembert", "MPNet")):
        inner, outer = "classifier.dense", "classifier.out_proj"
    last = DenseSpec(
        name="classifier" if by_token else outer,
        in_features=hidden,
        out_features=num_labels(config),
    )
    first = DenseSpec(name=inner, in_features=hidden, out_features=hidden, activation=activation)
    return [last] if by_token else [first, last]


def _modernbert_head(spec: ModelSpec, config: Fields) -> list[DenseSpec]:
    hidden = spec.hidden_size
    activation = config.text("classifier_activation", "gelu")
    if activation not in ("gelu", "relu", "tanh"):
        raise config.wrong("classifier_activation", "gelu, relu or tanh")
    first = DenseSpec(
        name="head.dense",
        in_features=hidden,
        out_features=hidden,
        bias=config.flag("classifier_bias", False),
        activation=activation,
        norm="head.norm",
        norm_bias=spec.norm_bias,
        norm_eps=spec.rms_norm_eps,
    )
    last = DenseSpec(name="classifier", in_features=hidden, out_features=num_labels(config))
    return [first, last]
