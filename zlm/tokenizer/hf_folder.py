"""Loads a tokenizer, its named special tokens and its chat templates from a Hugging Face folder.

Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
chat_template.json and additional_chat_templates/. Gives what transformers' tokenizers give, without
importing transformers: so tokenizer.json alone says whether BOS and EOS are added, whatever
add_bos_token says beside it.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from zlm.errors import ModelError

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def load_tokenizer(folder: Path) -> tuple[Tokenizer, dict[str, Any], dict[str, str]]:
    """Return the tokenizer, its named special tokens and its chat templates by name.

    Raises ModelError naming the file that is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(_missing(folder))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise ModelError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config)
    special |= _special_tokens(_read_json(folder / "special_tokens_map.json"))
    _add_tokens(tokenizer, config, special)
    return tokenizer, special, _chat_templates(folder, config)


def _missing(folder: Path) -> str:
    if (folder / "tokenizer.model").exists():
        return (
            f"{folder} has a SentencePiece tokenizer.model but no tokenizer.json, which zlm needs: "
            "convert it once with transformers (AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder)) or pass --tokenizer with a folder or id that has one"
        )
    if (folder / "vocab.json").exists():
        return (
            f"{folder} has vocab.json and merges.txt but no tokenizer.json, which zlm needs: "
            "convert it once with transformers or pass --tokenizer"
        )
    return f"{folder} has no tokenizer.json; pass --tokenizer with a folder or id that has one"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens *config* names, as text, under the names templates know."""
    found: dict[str, Any] = {}
    named = {name: config.get(name) for name in _NAMED}
    for source in (config.get("extra_special_tokens"), config.get("model_specific_special_tokens")):
        if isinstance(source, dict):
            named.update(source)
    for name, token in named.items():
        text = _content(token)
        if text is not None:
            found[name] = text
    more = config.get("additional_special_tokens")
    if more is None and isinstance(config.get("extra_special_tokens"), list):
        more = config["extra_special_tokens"]
    texts = [text for text in map(_content, more or ()) if text is not None]
    if texts:
        found["additional_special_tokens"] = texts
    return found


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, Any]) -> None:
    """Add what the config names beyond tokenizer.json, and mark what it calls special."""
    added = tokenizer.get_added_tokens_decoder().values()
    known = {token.content: token.special for token in added}
    declared = config.get("added_tokens_decoder") or {}
    for token_id, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        content = fields["content"]
        is_special = bool(fields.get("special", False))
        if content in known and (known[content] or not is_special):
            continue
        flags = {k: fields[k] for k in ("single_word", "lstrip", "rstrip") if k in fields}
        normalized = fields.get("normalized", not is_special)
        token = AddedToken(content, special=is_special, normalized=normalized, **flags)
        if is_special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(content) != int(token_id):
            raise ModelError(
                f"tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json "
                f"{tokenizer.token_to_id(content)}"
            )
        known[content] = is_special
    texts = [t for name, t in special.items() if name != "additional_special_tokens"]
    for text in [*texts, *special.get("additional_special_tokens", ())]:
        if not known.get(text, False) and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known[text] = True


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name; a file of its own wins over the config's entry."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    for source in (entry, legacy):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, dict):
            templates.update(source)
        elif isinstance(source, list):
            templates.update({item["name"]: item["template"] for item in source})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    main = folder / "chat_template.jinja"
    if main.exists():
        templates["default"] = main.read_text(encoding="utf-8")
    return templates
