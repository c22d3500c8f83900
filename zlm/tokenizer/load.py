"""Loads a vocabulary from a Hugging Face folder or a GGUF file, and finds the chat template.

Knows where things are, not what they mean: ``hf_folder`` and ``gguf_vocabulary`` do.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zlm.errors import ConfigError, ModelError
from zlm.tokenizer import gguf_vocabulary, hf_folder
from zlm.tokenizer.vocabulary import Vocabulary

GGUF_MAGIC = b"GGUF"


def load_vocabulary(path: str, *, chat_template: str | None = None) -> Vocabulary:
    """Return the vocabulary at *path*: a folder, or a GGUF file.

    *chat_template* replaces the checkpoint's: a file, or the template itself. Raises ModelError
    naming what is missing, ConfigError if the template's file is not there.
    """
    where = Path(path)
    if where.is_dir():
        tokenizer, special, templates = hf_folder.load_tokenizer(where)
    elif where.is_file():
        tokenizer, special, templates = _load_gguf(where)
    else:
        raise ModelError(f"there is no tokenizer at {path}")
    if chat_template is not None:
        templates = {"default": read_chat_template(chat_template)}
    return Vocabulary(tokenizer, special, templates)


def read_chat_template(value: str) -> str:
    """Return the template that ``--chat-template`` means: a file's text, or *value* itself."""
    if "{" in value or "\n" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise ConfigError(f"--chat-template {value}: there is no such file")
    return path.read_text(encoding="utf-8")


def _load_gguf(path: Path) -> tuple[Tokenizer, dict[str, Any], dict[str, str]]:
    with path.open("rb") as file:
        if file.read(4) != GGUF_MAGIC:
            raise ModelError(f"{path} is neither a folder with tokenizer.json nor a GGUF file")
    from zlm.weights.gguf import GGUFFile

    metadata = GGUFFile(str(path)).metadata
    return (
        gguf_vocabulary.build_tokenizer(metadata),
        gguf_vocabulary.named_special_tokens(metadata),
        gguf_vocabulary.chat_templates(metadata),
    )
