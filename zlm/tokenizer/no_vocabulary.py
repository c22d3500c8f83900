"""The vocabulary of a model without a tokenizer (``--skip-tokenizer-init``): ids only, no text.

Prompts are token ids and so are answers; whatever would need text to become ids, or ids to become
text that was asked for, is refused in words that name the flag.
"""

from typing import NoReturn

from tokenizers import Tokenizer, decoders, models

from zlm.errors import BadRequest
from zlm.tokenizer.vocabulary import Vocabulary


class NoVocabulary(Vocabulary):
    """A vocabulary that knows no token: every id stands for an empty text."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Refuse: there is nothing to encode with."""
        _refuse()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Refuse: there is nothing to decode with."""
        _refuse()


def _refuse() -> NoReturn:
    raise BadRequest(
        "this model runs without a tokenizer (--skip-tokenizer-init): "
        "prompts and answers are token ids"
    )
