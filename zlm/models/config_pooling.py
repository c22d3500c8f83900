"""What is done with hidden states: sentence-transformers' module files, and classification heads.

``modules.json`` lists a pipeline of folders: a transformer, a pooling, dense layers, a
normalization. What a folder's files leave out means what sentence-transformers means by that. No
weights are read here: dense layers are named, with their shapes.
"""

from pathlib import Path

import msgspec

from zlm.config import DenseSpec, ModelSpec, PoolingSpec
from zlm.errors import ModelError
from zlm.models.config_fields import Fields, read_fields, read_fields_if_there

MODULES = "modules.json"
POOLINGS = {  # sentence-transformers' flags of 1_Pooling/config.json
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "sqrt",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
NAMED_POOLINGS = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "sqrt",
    "weightedmean": "weightedmean",
}
ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softmax": "softmax"}
MATRYOSHKA = {  # families whose embedders were trained to be cut, where no file says so
    "gemma3": (128, 256, 512, 768),
}
QWEN3_LEAST = 32  # Qwen3-Embedding: any length from here on


class _Module(msgspec.Struct):
    """One entry of modules.json."""

    type: str
    path: str = ""


def has_modules(folder: Path) -> bool:
    """Whether *folder* is a sentence-transformers pipeline."""
    return (folder / MODULES).is_file()


def pipeline(folder: Path, config: Fields, spec: ModelSpec) -> PoolingSpec:
    """Return the pooling that the module files of *folder* describe.

    Raises ModelError, naming the file, for a module or a pooling that is not supported.
    """
    pooling, dense, normalize = "", list[DenseSpec](), False
    width = spec.hidden_size
    for module in _modules(folder / MODULES):
        kind = module.type.rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(read_fields(folder / module.path / "config.json"))
        elif kind == "Dense":
            dense.append(_dense(folder, module.path, width))
            width = dense[-1].out_features
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(f"{folder / MODULES}: a module of type {kind} is not supported")
    settings = read_fields_if_there(folder / "config_sentence_transformers.json")
    prompts = settings.part("prompts")
    lengths = [
        fields.integer("max_seq_length", 0, least=0)
        for name in ("sentence_bert_config.json", "sentence_roberta_config.json")
        if (fields := read_fields_if_there(folder / name)).has("max_seq_length")
    ]
    default = settings.text("default_prompt_name", "")
    named = {} if prompts is None else {name: prompts.text(name, "") for name in prompts.values}
    if default and default not in named:
        raise settings.wrong("default_prompt_name", "the name of one of its prompts")
    sizes, least = _dimensions(config, spec, width)
    return PoolingSpec(
        kind=pooling or ("tokens" if dense else "mean"),  # ColBERT's: a projection, no pooling
        normalize=normalize,
        dense=tuple(dense),
        max_tokens=min(lengths[0], spec.max_position) if lengths else 0,
        prompts=named,
        default_prompt=default,
        dimensions=sizes,
        least_dimensions=least,
    )


def classifier(config: Fields, dense: list[DenseSpec], kind: str) -> PoolingSpec:
    """Return the pooling of a cross-encoder whose head is *dense*, the last for the labels."""
    names = config.part("id2label")
    count = dense[-1].out_features
    labels = [f"LABEL_{i}" for i in range(count)]
    if names is not None:
        labels = [names.text(str(i), label) for i, label in enumerate(labels)]
    return PoolingSpec(
        kind=kind,
        normalize=False,
        dense=tuple(dense),
        num_labels=count,
        labels=tuple(labels),
        activation=_activation(config, count),
    )


def decoder_classifier(config: Fields, hidden_size: int) -> PoolingSpec:
    """Return the pooling of a decoder that classifies a text by its last token."""
    score = DenseSpec(
        name="score", in_features=hidden_size, out_features=num_labels(config), bias=False
    )
    return classifier(config, [score], "last")


def num_labels(config: Fields) -> int:
    """Return how many labels a classifier's config.json names; two by default."""
    names = config.part("id2label")
    if names is not None and names.values:
        return len(names.values)
    return config.integer("num_labels", 2)


def _activation(config: Fields, count: int) -> str:
    """Return the function of the logits: what the cross-encoder's files say, else by its kind."""
    settings = config.part("sentence_transformers")
    named = config.text("sbert_ce_default_activation_function", "")
    if settings is not None:
        named = settings.text("activation_fn", named)
    kind = named.rpartition(".")[2]
    if kind:
        if kind not in ACTIVATIONS:
            raise ModelError(f"{config.source}: the activation {named} is not supported")
        return ACTIVATIONS[kind]
    several = count > 1 and config.text("problem_type", "") != "multi_label_classification"
    return "softmax" if several else "sigmoid"


def _modules(path: Path) -> list[_Module]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _pooling(config: Fields) -> str:
    if not config.flag("include_prompt", True):
        raise ModelError(f"{config.source}: pooling without the prompt is not supported")
    if config.has("pooling_mode"):
        named = config.text("pooling_mode", "")
        if named not in NAMED_POOLINGS:
            raise config.wrong("pooling_mode", f"one of {', '.join(NAMED_POOLINGS)}")
        return NAMED_POOLINGS[named]
    found = [kind for flag, kind in POOLINGS.items() if config.flag(flag, False)]
    if len(found) > 1:
        raise ModelError(
            f"{config.source}: pooling in several ways at once is not supported, only one of "
            f"{', '.join(POOLINGS)}"
        )
    return found[0] if found else "mean"


def _dense(folder: Path, path: str, width: int) -> DenseSpec:
    config = read_fields(folder / path / "config.json")
    config.require(["in_features", "out_features"])
    named = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = named.rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise ModelError(f"{config.source}: the activation {named} is not supported")
    if config.integer("in_features", 0) != width:
        raise config.wrong("in_features", f"{width}, the width of what comes before")
    return DenseSpec(
        name="linear",
        in_features=width,
        out_features=config.integer("out_features", 0),
        bias=config.flag("bias", True),
        activation=ACTIVATIONS[activation],
        path=path,
    )


def _dimensions(config: Fields, spec: ModelSpec, width: int) -> tuple[tuple[int, ...], int]:
    """Return the lengths to which a vector of *width* may be cut, and the least free one, or 0."""
    if config.has("matryoshka_dimensions"):
        sizes = config.numbers("matryoshka_dimensions")
        return tuple(sorted(int(size) for size in sizes if 1 <= size < width)), 0
    if config.flag("is_matryoshka", False):
        return (), 1
    return trained_dimensions(spec, width)


def trained_dimensions(spec: ModelSpec, width: int) -> tuple[tuple[int, ...], int]:
    """Return the same of families of which it is known where no file says it."""
    if spec.bidirectional and spec.architecture in MATRYOSHKA:
        return tuple(size for size in MATRYOSHKA[spec.architecture] if size < width), 0
    return (), QWEN3_LEAST if spec.architecture == "qwen3" else 0
