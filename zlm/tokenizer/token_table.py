"""What each token id contributes to a text, in the two ways tokenizers decode.

bytes   byte-level BPE: every token is bytes.
text    SentencePiece and its like: every token is text (▁ is a space), or one byte, <0xHH>.

Tables fill as ids are first seen, so that loading costs nothing. Knows nothing of sequences.
"""

import re
from collections.abc import Callable
from typing import Any

from zlm.errors import ModelError
from zlm.tokenizer.vocabulary import Vocabulary, steps_of

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
_SPACE = "▁"


def byte_alphabet() -> dict[str, int]:
    """Return which byte each character of byte-level BPE's alphabet stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + k): byte for k, byte in enumerate(others)})
    return alphabet


def _alphabet_to_bytes() -> dict[int, int]:
    """Return a table for str.translate: the alphabet to Latin-1 by byte, all else out of it."""
    outside = dict.fromkeys(range(256), 0xFFFF)  # that character is no byte in Latin-1
    return outside | {ord(character): byte for character, byte in byte_alphabet().items()}


_TO_BYTES = _alphabet_to_bytes()


class Filled(dict[int, Any]):
    """A dict by token id that computes what it does not have yet."""

    def __init__(self, compute: Callable[[int], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: int) -> Any:
        value = self[key] = self._compute(key)
        return value


class TokenTable:
    """The contributions of all ids of one vocabulary; shared by its sequences.

    byte_level: which of the two ways it is.
    raw: id to bytes.  pieces: id to text, or to an int that is a byte (text way only).
    texts: id to text, None if its bytes are none by themselves (bytes way only).
    shown_texts: the same, empty for special tokens.
    strip_start: how many spaces the decoder strips from the start of a text.
    first_loses_spaces: whether the first token of a text loses its spaces.
    separator: what stands between two tokens.

    An id that the tokenizer does not have contributes nothing.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raise ModelError if the vocabulary's decoder has a step that is not known."""
        self._vocabulary = vocabulary
        self.special_ids = vocabulary.special_ids
        steps = steps_of(vocabulary.decoder)
        kinds = [step["type"] for step in steps]
        self.byte_level = kinds == ["ByteLevel"]
        self.strip_start = 0
        self.first_loses_spaces = False
        self.separator = "" if steps else " "
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements: list[tuple[str, str]] = []
        if not self.byte_level:
            for step in steps:
                self._take_step(step, fused="Fuse" in kinds)
        self.pieces = Filled(self._piece)
        self.raw = Filled(self._byte_level_bytes if self.byte_level else self._piece_bytes)
        self.texts = Filled(self._whole_text)
        self.shown_texts = Filled(self._shown_text)
        self._shown_but: dict[frozenset[int], Filled] = {}

    def _take_step(self, step: dict[str, Any], *, fused: bool) -> None:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replacements.append((step["replacement"], " "))
            self.first_loses_spaces = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0 and fused:
            self.strip_start = step["start"]
        elif kind not in ("ByteFallback", "Fuse"):
            raise ModelError(f"the tokenizer has a decoder step that zlm does not know: {step}")

    def _byte_level_bytes(self, token_id: int) -> bytes:
        token = self._vocabulary.token(token_id)
        if token is None:
            return b""
        try:
            return token.translate(_TO_BYTES).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()  # an added token is spelled as it is

    def _whole_text(self, token_id: int) -> str | None:
        try:
            text: str = self.raw[token_id].decode()
        except UnicodeDecodeError:
            return None
        return text

    def _shown_text(self, token_id: int) -> str | None:
        text: str | None = "" if token_id in self.special_ids else self.texts[token_id]
        return text

    def texts_hiding(self, hidden: frozenset[int]) -> Filled:
        """Return id to text as ``texts`` has it, empty for the ids in *hidden*."""
        if not hidden:
            return self.texts
        if hidden == self.special_ids:
            return self.shown_texts
        if hidden not in self._shown_but:
            self._shown_but[hidden] = Filled(lambda i: "" if i in hidden else self.texts[i])
        return self._shown_but[hidden]

    def _piece_bytes(self, token_id: int) -> bytes:
        piece = self.pieces[token_id]
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def _piece(self, token_id: int) -> str | int:
        token = self._vocabulary.token(token_id)
        return "" if token is None else self._read(token)

    def _read(self, token: str) -> str | int:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback:
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte is not None:
                return int(byte[1], 16)
        return token

    def known(self, token_id: int) -> bool:
        """Tell whether the tokenizer has this id; a model may have more rows than it has."""
        return self._vocabulary.token(token_id) is not None

    def first_piece(self, token_id: int) -> str | int:
        """Return the piece of a token that is the first of a text."""
        if not self.first_loses_spaces:
            return self.pieces[token_id]
        return self._read((self._vocabulary.token(token_id) or "").replace(_SPACE, ""))

    def name(self, token_id: int) -> str:
        """Return a token as logprobs show it: special ones by name, bad bytes as U+FFFD."""
        if token_id in self.special_ids:
            return self._vocabulary.token(token_id) or ""
        return self.raw[token_id].decode("utf-8", "replace")

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token as logprobs show them: of a special one, its name's."""
        if token_id in self.special_ids:
            return self.name(token_id).encode()
        return self.raw[token_id]
