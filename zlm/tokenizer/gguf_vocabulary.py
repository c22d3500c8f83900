"""Builds a tokenizer from a GGUF file's metadata.

Kinds that are known: byte-level BPE (``tokenizer.ggml.model`` = gpt2), SentencePiece BPE (llama),
and those of encoders (bert and t5, in ``gguf_encoders``). The ids are those of the original
tokenizer. A SentencePiece file lists no merges: they follow from the vocabulary, see
``derive_merges``. Knows the meaning of metadata keys, not the file format.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from zlm.errors import ModelError
from zlm.tokenizer import gguf_encoders
from zlm.tokenizer.pretokenizers import pre_tokenization

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

SPACE = "▁"
ENCODERS = {"bert": gguf_encoders.word_piece, "t5": gguf_encoders.unigram}
FRAMED = ("bert", "nomic-bert", "modern-bert")  # architectures whose texts stand in a frame

_NAMED_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the key is spelled so in the format
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that GGUF *metadata* describes, its BOS and EOS rules included.

    Raises ModelError when the file has no vocabulary or one of a kind that is not known.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata or kind is None:
        raise ModelError("the GGUF file holds no vocabulary; pass --tokenizer")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata), True
    elif kind in ENCODERS:
        tokenizer, add_bos = ENCODERS[kind](metadata), True
    else:
        raise ModelError(
            f"the GGUF file's tokenizer.ggml.model is {kind!r}; zlm knows gpt2 (byte-level BPE), "
            "llama (SentencePiece BPE), bert (WordPiece) and t5 (Unigram): pass the original "
            "tokenizer with --tokenizer"
        )
    _add_tokens(tokenizer, metadata)
    if metadata.get("general.architecture") in FRAMED:
        gguf_encoders.set_frame(tokenizer, metadata)
    else:
        _set_bos_eos(tokenizer, metadata, add_bos)
    return tokenizer


def named_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token, eos_token, ... as chat templates know them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {}
    for name, key in _NAMED_SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    return named


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates in the file by name; the main one is ``default``."""
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key == prefix:
            templates["default"] = value
        elif key.startswith(prefix + ".") and isinstance(value, str):
            templates[key[len(prefix) + 1 :]] = value
    return templates


def derive_merges(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE vocabulary, most urgent first.

    SentencePiece merges the adjacent pair whose joined text has the best score. So every way to
    cut a token into two tokens is a merge, ranked by the token's score; ways to cut one token are
    ranked by the ids of their parts. Runs of spaces that the file marks as user-defined come first,
    as SentencePiece takes those before it looks at scores; other marked tokens are never merged
    into, as they are found in the text whole or not at all.

    262,144 tokens give 514,000 merges in about a second.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    spaces = [i for i, t in enumerate(types) if t == USER_DEFINED and not tokens[i].strip(SPACE)]
    marked = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
    plain = [i for i, t in enumerate(types) if t not in marked]
    plain.sort(key=scores.__getitem__, reverse=True)
    merges: list[tuple[str, str]] = []
    for i in spaces + plain:
        token = tokens[i]
        pairs = [
            (left, right)
            for k in range(1, len(token))
            if (left := token[:k]) in ids and (right := token[k:]) in ids
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    rules = pre_tokenization(metadata.get("tokenizer.ggml.pre", "default"))
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=rules.ignore_merges,
    )
    tokenizer = Tokenizer(model)
    normalizer = rules.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rules.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = _spelled(metadata)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError("the GGUF file's SentencePiece vocabulary has no tokenizer.ggml.scores")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
    else:
        merges = derive_merges(tokens, scores, types)
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _spelled(metadata: Mapping[str, Any]) -> list[str]:
    """Return the tokens with runs of spaces, which the file holds as such, spelled with ▁."""
    return [
        SPACE * len(token) if token and not token.strip(" ") else token
        for token in metadata["tokenizer.ggml.tokens"]
    ]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Make the tokens that the file marks be found whole in text; control tokens are special."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    tokens = _spelled(metadata) if sentencepiece else metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    special, plain = [], []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if not token:
            continue
        if kind == CONTROL or i == unknown:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _set_bos_eos(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    add = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    chosen = {}
    for name, wanted in add.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not wanted:
            continue
        if token_id is None:
            if f"tokenizer.ggml.add_{name}_token" in metadata:
                raise ModelError(f"the GGUF file asks for {name.upper()} but does not name its id")
            continue
        chosen[name] = (tokens[token_id], token_id)
    _set_template(tokenizer, chosen.get("bos"), chosen.get("eos"))


def _set_template(
    tokenizer: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    """Make *tokenizer* put *bos* before and *eos* behind a text encoded with special tokens."""
    special = [token for token in (bos, eos) if token is not None]
    before = [f"{bos[0]}:0"] if bos else []
    behind = [f"{eos[0]}:0"] if eos else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *behind],
        pair=[*before, "$A:0", *behind, *before, "$B:1", *behind],
        special_tokens=list(dict.fromkeys(special)),
    )
