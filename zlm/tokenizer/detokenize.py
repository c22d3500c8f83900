"""Ids to text, one token at a time, exactly as decoding all ids at once gives it.

A ``Detokenizer`` per sequence joins what ``TokenTable`` says each token contributes and holds back
what is not text yet:

bytes way   all bytes are read as UTF-8, invalid ones becoming U+FFFD. Bytes of a character that is
            not whole yet are held back.
text way    a run of byte tokens is read as UTF-8 if the whole run is valid, else each of its bytes
            becomes U+FFFD (so does the tokenizers library), so a run is held back until it ends.

A push costs about half a microsecond, whatever the length of the text; nearly all tokens of the
bytes way are whole characters, whose text is looked up (0.1 microseconds).
"""

from codecs import utf_8_decode
from typing import Protocol

from zlm.tokenizer.token_table import TokenTable

REPLACEMENT = "�"
_NONE_HIDDEN: frozenset[int] = frozenset()


class Detokenizer(Protocol):
    """One sequence's text as its tokens arrive. Owns what is held back.

    The texts that ``push`` and ``flush`` return, joined, are the decode of all ids pushed.
    ``pending`` tells whether a token was taken of whose text something is still held back,
    ``whole_held`` how many whole characters are.
    """

    @property
    def pending(self) -> bool: ...
    @property
    def whole_held(self) -> int: ...
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


def detokenizer(
    table: TokenTable,
    *,
    skip_special_tokens: bool = True,
    continues: bool = False,
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """Return a detokenizer for a new sequence.

    *continues* says that the text goes on from a prompt: then nothing is stripped from its start,
    as a decoder does with the start of a whole text, so that " Paris" keeps its space. *shown* are
    special tokens that are never skipped.
    """
    hidden = table.special_ids - shown if skip_special_tokens else _NONE_HIDDEN
    if table.byte_level:
        return _ByteDetokenizer(table, hidden)
    return _TextDetokenizer(table, hidden, continues)


class _ByteDetokenizer:
    __slots__ = ("_held", "_hidden", "_raw", "_texts")

    def __init__(self, table: TokenTable, hidden: frozenset[int]) -> None:
        self._raw = table.raw
        self._texts = table.texts_hiding(hidden)
        self._hidden = hidden
        self._held = b""

    @property
    def pending(self) -> bool:
        return bool(self._held)

    @property
    def whole_held(self) -> int:
        return 0

    def push(self, token_id: int) -> str:
        if not self._held:
            whole: str | None = self._texts[token_id]
            if whole is not None:
                return whole
        if token_id in self._hidden:
            return ""
        data = self._held + self._raw[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class _TextDetokenizer:
    __slots__ = ("_first", "_hidden", "_run", "_strip", "_table")

    def __init__(self, table: TokenTable, hidden: frozenset[int], continues: bool) -> None:
        self._table = table
        self._hidden = hidden
        self._run = bytearray()  # of byte tokens, not ended yet
        self._first = not continues  # the next token is the first of a text
        self._strip = 0 if continues else table.strip_start  # spaces still to strip

    @property
    def pending(self) -> bool:
        return bool(self._run)

    @property
    def whole_held(self) -> int:
        return len(utf_8_decode(self._run, "replace", False)[0])

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        table = self._table
        if self._first:
            if not table.known(token_id):
                return ""
            self._first = False
            piece = table.first_piece(token_id)
        else:
            piece = table.pieces[token_id]
            if table.separator and table.known(token_id):
                piece = f"{table.separator}{piece}"
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._run and piece:
            piece = self._end_run() + piece
        return self._stripped(piece) if self._strip else piece

    def flush(self) -> str:
        text = self._end_run()
        return self._stripped(text) if self._strip else text

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Strip what is left of the leading spaces that the decoder takes off a text."""
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text
