"""Tokenizers of encoders from a GGUF file's metadata: WordPiece (BERT) and Unigram (XLM-RoBERTa).

A WordPiece vocabulary is stored the other way round: pieces that begin a word have ▁ before them,
and those that continue one lack BERT's ##. Whether text is lowercased is said by newer files only;
of others a vocabulary without capital letters means that it is. Knows the meaning of metadata
keys, not the file format.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from zlm.errors import ModelError

SPACE = "▁"
CONTROL = 3  # of tokenizer.ggml.token_type
UNUSED = 5
_LONGEST_WORD = 100  # characters; a longer one is unknown, as in BERT

Metadata = Mapping[str, Any]


def word_piece(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer of a file whose ``tokenizer.ggml.model`` is ``bert``."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    pieces = [_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]
    unknown = _named(metadata, tokens, "unknown", "[UNK]")
    tokenizer = Tokenizer(
        models.WordPiece(
            {piece: i for i, piece in enumerate(pieces)},
            unk_token=unknown,
            max_input_chars_per_word=_LONGEST_WORD,
        )
    )
    plain = [piece for piece, kind in zip(pieces, types, strict=True) if kind != CONTROL]
    has_capitals = any(
        "A" <= letter <= "Z" for piece in plain if not _is_bracketed(piece) for letter in piece
    )
    lowercase = metadata.get("tokenizer.ggml.normalizer.lowercase", not has_capitals)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase,
        strip_accents=metadata.get("tokenizer.ggml.normalizer.strip_accents"),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer of a file whose ``tokenizer.ggml.model`` is ``t5``."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError("the GGUF file's Unigram vocabulary has no tokenizer.ggml.scores")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    # An unknown character costs a little more than the worst token: padding must not be that.
    worst = min(score for score, kind in zip(scores, types, strict=True) if kind != UNUSED)
    vocabulary = [(token, max(score, worst)) for token, score in zip(tokens, scores, strict=True)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap:
        raw = np.asarray(charsmap, np.int64).astype(np.uint8).tobytes()
        tokenizer.normalizer = normalizers.Precompiled(raw)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "always" if prefix else "never"
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    tokenizer.pre_tokenizer = metaspace
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", True):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), metaspace]
        )
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return tokenizer


def set_frame(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Make *tokenizer* put a text, or a pair of texts, between the tokens that encoders expect.

    BERT:  [CLS] a [SEP],  [CLS] a [SEP] b [SEP] with the second part of segment 1.
    RoBERTa:  <s> a </s>,  <s> a </s> </s> b </s>,  all of segment 0.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    begin = _id(metadata, tokens, ("cls", "bos"), "[CLS]")
    end = _id(metadata, tokens, ("seperator", "eos"), "[SEP]")
    first, last = tokens[begin], tokens[end]
    pair = [f"{first}:0", "$A:0", f"{last}:0", "$B:1", f"{last}:1"]
    if first == "<s>":
        pair = [f"{first}:0", "$A:0", f"{last}:0", f"{last}:0", "$B:0", f"{last}:0"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{first}:0", "$A:0", f"{last}:0"],
        pair=pair,
        special_tokens=[(first, begin), (last, end)],
    )


def _piece(token: str, kind: int) -> str:
    """Return *token* as BERT's own vocabulary spells it."""
    if kind == CONTROL or _is_bracketed(token):
        return token
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def _is_bracketed(token: str) -> bool:
    """Whether *token* is one of the vocabulary's own, such as [CLS] and [unused7]."""
    return len(token) > 2 and token.startswith("[") and token.endswith("]")


def _named(metadata: Metadata, tokens: list[str], role: str, usual: str) -> str:
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return usual if token_id is None else tokens[token_id]


def _id(metadata: Metadata, tokens: list[str], roles: tuple[str, ...], usual: str) -> int:
    for role in roles:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            return int(token_id)
    if usual in tokens:
        return tokens.index(usual)
    raise ModelError(
        f"the GGUF file names no {roles[-1]} token, which an encoder needs; pass --tokenizer"
    )
