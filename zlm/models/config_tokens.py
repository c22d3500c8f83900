"""Begin and end tokens of a checkpoint, gathered from every file that names some.

EOS ids are a union: ``eos_token_id`` of config.json (and of its text_config) and of
generation_config.json, each an int, a list, null or absent; the tokenizer's own ``eos_token`` and
``eot_token``; and the end-of-turn marker that the chat template writes, where the tokenizer marks
it as a special token. A checkpoint tuned to chat often lists only the first of them, and then never
stops. The tokenizer is not loaded for this: token names are looked up in its JSON.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from zlm.errors import ModelError
from zlm.models.config_fields import Fields, read_fields_if_there

# Names that end a turn in the chat formats of the common families.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|end|>",
    "<|eot|>",
    "<turn|>",
)
GGUF_CONTROL = 3  # tokenizer.ggml.token_type of a control token


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is wanted; the rest is skipped, not decoded."""

    added_tokens: list[_AddedToken] = []


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list = msgspec.field(default_factory=dict)


class _TokenizerModel(msgspec.Struct):
    model: _Vocabulary = msgspec.field(default_factory=_Vocabulary)


class TokenNames:
    """Names of tokens to their ids, from a folder's tokenizer files, each read when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_fields_if_there(folder / "tokenizer_config.json")
        self._special_map = read_fields_if_there(folder / "special_tokens_map.json")
        self._added: dict[str, tuple[int, bool]] | None = None

    def named(self, role: str) -> str | None:
        """Return the text of the token that plays *role* (bos_token, eos_token, eot_token)."""
        for fields in (self.config, self._special_map):
            value = fields.values.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str) and value:
                return value
        return None

    def id_of(self, role: str) -> int | None:
        """Return the id of the token that plays *role*, None if none does or it is not found."""
        name = self.named(role)
        if name is None:
            return None
        found = self.added().get(name)
        return found[0] if found else self._vocabulary().get(name)

    def end_of_turn(self) -> Iterable[int]:
        """Yield the ids of special tokens that the chat template writes at the end of a turn."""
        template = self._chat_template()
        for name in END_OF_TURN:
            token, special = self.added().get(name, (0, False)) if name in template else (0, False)
            if special:
                yield token

    def added(self) -> dict[str, tuple[int, bool]]:
        """Return added tokens: name to (id, whether it is special)."""
        if self._added is None:
            listed = self.config.part("added_tokens_decoder")
            if listed is not None and listed.values:
                self._added = _from_decoder(listed)
            else:
                tokens = self._decode(_TokenizerFile).added_tokens
                self._added = {token.content: (token.id, token.special) for token in tokens}
        return self._added

    def _vocabulary(self) -> dict[str, int]:
        vocabulary = self._decode(_TokenizerModel).model.vocab
        if isinstance(vocabulary, list):  # unigram: [piece, score] pairs, the id is the place
            return {item[0]: place for place, item in enumerate(vocabulary)}
        return vocabulary

    def _decode(self, kind: type) -> Any:
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            return kind()
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.MsgspecError as error:
            raise ModelError(f"{path} is damaged: {error}") from error

    def _chat_template(self) -> str:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text("utf-8", "replace")
        template = self.config.values.get("chat_template")
        if template is None:
            template = read_fields_if_there(self._folder / "chat_template.json").values.get(
                "chat_template"
            )
        return template if isinstance(template, str) else str(template or "")


def _from_decoder(listed: Fields) -> dict[str, tuple[int, bool]]:
    """Read added_tokens_decoder: ids as strings to objects with ``content`` and ``special``."""
    tokens = {}
    for number, entry in listed.values.items():
        if number.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            tokens[entry["content"]] = (int(number), entry.get("special") is True)
    return tokens


def token_ids(fields: Fields, key: str) -> list[int]:
    """Return the ids under *key*: an int, a list of ints, null or nothing."""
    value = fields.values.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise fields.wrong(key, "a token id, a list of them, or null")
    return values


def folder_tokens(
    configs: list[Fields],
    generation: Fields,
    names: TokenNames,
    *,
    vocab_size: int,
    default_bos: int | None,
    default_eos: int | None,
) -> tuple[int | None, tuple[int, ...]]:
    """Return (BOS id, EOS ids) of a Hugging Face folder; *configs* are outermost first.

    The defaults are the architecture's, used where no file says anything at all.
    """
    eos: list[int] = []
    for fields in (*configs, generation):
        eos += token_ids(fields, "eos_token_id")
    eos += [
        token for role in ("eos_token", "eot_token") if (token := names.id_of(role)) is not None
    ]
    eos += names.end_of_turn()
    said = any("eos_token_id" in fields.values for fields in configs)
    if not eos and not said and default_eos is not None:
        eos = [default_eos]
    bos = [token for fields in reversed(configs) for token in token_ids(fields, "bos_token_id")]
    if not bos and (token := names.id_of("bos_token")) is not None:
        bos = [token]
    if not bos and not any("bos_token_id" in fields.values for fields in configs):
        bos = [] if default_bos is None else [default_bos]
    return (_known(bos, vocab_size) or (None,))[0], _known(eos, vocab_size)


def gguf_tokens(metadata: dict[str, Any], vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return (BOS id, EOS ids) of a GGUF file: its eos, eot and eom keys and the turn marker."""
    keys = Fields(metadata, "the metadata")
    eos: list[int] = []
    for role in ("eos", "eot", "eom"):
        eos += token_ids(keys, f"tokenizer.ggml.{role}_token_id")
    template = str(metadata.get("tokenizer.chat_template") or "")
    markers = [name for name in END_OF_TURN if name in template]
    if markers:
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        kinds = metadata.get("tokenizer.ggml.token_type", [])
        for name in markers:
            place = tokens.index(name) if name in tokens else -1
            if 0 <= place < len(kinds) and kinds[place] == GGUF_CONTROL:
                eos.append(place)
    bos = token_ids(keys, "tokenizer.ggml.bos_token_id")
    return (_known(bos, vocab_size) or (None,))[0], _known(eos, vocab_size)


def _known(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """Return *ids* once each, in order, without those the model cannot produce (such as -1)."""
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))
