"""A model's vocabulary: text to ids and ids to text, special tokens, and chat templates.

Owns the ``tokenizers.Tokenizer``. Knows nothing of requests or streams. All encoding is without
truncation; ids are those of the checkpoint's own tokenizer.
"""

import json
import re
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from zlm.errors import BadRequest

_ANCHOR = "\n"  # stands before a text that is not at the start of anything
_MARGIN_TOKENS = 1024  # where a text is cut, its first tokens may differ from those of the whole
_CHECK_LENGTH_ABOVE = 65_536  # characters; shorter texts are encoded without a look at their length


class Vocabulary:
    """Encodes and decodes with one tokenizer.

    special_tokens: texts by template name (``bos_token``, ..., ``additional_special_tokens``).
    chat_templates: template texts by name; the main one is ``default``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: dict[str, Any] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._special_texts = {token.content for token in added.values() if token.special}
        self._typed: dict[str, list[int]] = {}  # special tokens' texts encoded as plain text
        bos = self.special_tokens.get("bos_token")
        self.bos_id: int | None = None if bos is None else tokenizer.token_to_id(bos)

    # ------------------------------------------------------------------ text to ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of *text*; special tokens written in it count as such.

        Raises BadRequest if *text* is not valid Unicode (a lone surrogate).
        """
        encode = self.tokenizer.encode_batch_fast  # unlike encode(): no offsets, twice as fast
        try:
            return encode([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise BadRequest("the text holds a lone surrogate, which is not a character") from None

    def encode_cut(self, text: str, most: int, *, add_special_tokens: bool) -> list[int]:
        """Return at most *most* ids: of the start of *text*, and what the tokenizer adds to it."""
        tokenizer = self.tokenizer
        added = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding = tokenizer.encode(text, add_special_tokens=False)
        encoding.truncate(max(most - added, 0))
        return tokenizer.post_process(encoding, None, add_special_tokens).ids[:most]

    def encode_pair(
        self, first: str, second: str, most: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of two texts joined as the tokenizer joins pairs, and their segments.

        Of more than *most* ids, the longer text's last ones are left out.
        """
        tokenizer = self.tokenizer
        try:
            a, b = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
        except (TypeError, UnicodeEncodeError):
            raise BadRequest("the text holds a lone surrogate, which is not a character") from None
        if most is not None:
            room = max(most - tokenizer.num_special_tokens_to_add(True), 0)
            shorter = min(len(a.ids), len(b.ids))
            rest = room - shorter if shorter <= room // 2 else room - room // 2
            half = shorter if shorter <= room // 2 else room // 2
            a_room, b_room = (half, rest) if len(a.ids) <= len(b.ids) else (rest, half)
            a.truncate(a_room)
            b.truncate(b_room)
        joined = tokenizer.post_process(a, b, True)
        return joined.ids, joined.type_ids

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of *text* as it is encoded in the middle of a text.

        The same as ``encode`` but for tokenizers that put a space before the start of a text.
        """
        if not self._prefixes_space:
            return self.encode(text)
        ids = self.encode(_ANCHOR + text)
        anchor = self._anchor_ids
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

    def encode_typed(self, text: str) -> list[int]:
        """Return the ids of a special token's *text* taken as plain text, never as that token."""
        ids = self._typed.get(text)
        if ids is None:
            self.tokenizer.encode_special_tokens = True
            try:
                ids = self.encode_inside(text)
            finally:
                self.tokenizer.encode_special_tokens = False
            if text in self._special_texts:
                self._typed[text] = ids
        return ids

    def surround(self, token_ids: list[int]) -> list[int]:
        """Return *token_ids* with the BOS and EOS that the tokenizer adds to a text."""
        around = self.encode("", add_special_tokens=True)
        before = around[:1] if around and around[0] == self.bos_id else []
        return [*before, *token_ids, *around[len(before) :]]

    def tail(self, text: str, tokens: int) -> str:
        """Return an end of *text* that surely holds its last *tokens* tokens, cut well before."""
        most = self._most_characters
        return text[-(tokens + _MARGIN_TOKENS) * most :] if most else text

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that *text* surely has at least, without encoding it.

        0 for a text short enough to be just encoded, and for tokenizers that may shrink text.
        """
        if len(text) <= _CHECK_LENGTH_ABOVE:
            return 0
        return len(text) // self._most_characters if self._most_characters else 0

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the text of any special token, the longest first; None if there is none."""
        if not self._special_texts:
            return None
        longest_first = sorted(self._special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    # ------------------------------------------------------------------ ids to text

    @property
    def size(self) -> int:
        """Number of tokens the tokenizer knows; the model may have more rows."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, None for an id it does not have."""
        return self.tokenizer.id_to_token(token_id)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of *token_ids* decoded at once."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def decoder(self) -> dict[str, Any] | None:
        """The decoder as tokenizer.json describes it."""
        return _state(self.tokenizer.decoder)

    # ------------------------------------------------------------------ facts, found once

    @cached_property
    def _prefixes_space(self) -> bool:
        for part in _parts(_state(self.tokenizer.normalizer)):
            if part["type"] == "Prepend":
                return True
        for part in _parts(_state(self.tokenizer.pre_tokenizer)):
            if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
                return True
            if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
                return True
        return False

    @cached_property
    def _anchor_ids(self) -> list[int]:
        return self.encode(_ANCHOR)

    @cached_property
    def _most_characters(self) -> int:
        """Most characters of text that one token can stand for; 0 if that is not bounded."""
        byte_level = any(p["type"] == "ByteLevel" for p in _parts(self.decoder))
        byte_fallback = any(p["type"] == "ByteFallback" for p in _parts(self.decoder))
        if not (byte_level or byte_fallback):
            return 0
        if any(t.lstrip or t.rstrip for t in self.tokenizer.get_added_tokens_decoder().values()):
            return 0
        longest = max(map(len, self.tokenizer.get_vocab()), default=0)
        # NFC and its like join at most four characters into one.
        composes = self.tokenizer.normalizer is not None and byte_level
        return longest * 4 if composes else longest


def _state(component: Any) -> dict[str, Any] | None:
    """Return a tokenizer component as tokenizer.json holds it."""
    return None if component is None else json.loads(component.__getstate__())


def _parts(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a component, those of a Sequence one by one."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    lists = (state[k] for k in ("normalizers", "pretokenizers", "decoders") if k in state)
    return [part for steps in lists for step in steps for part in _parts(step)]


def steps_of(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a component as tokenizer.json describes it, in order."""
    return _parts(state)
