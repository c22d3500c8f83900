"""How byte-level BPE vocabularies cut text before merging, by the name a GGUF file gives it.

A GGUF file carries no ``tokenizer.json``: ``tokenizer.ggml.pre`` only names the way the original
tokenizer splits text. This table maps those names back to what the original ``tokenizer.json`` of
each family holds. Knows nothing of vocabularies or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from zlm.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASH_TAIL}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _HAN_KANA,
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """One family's way of cutting text.

    patterns: regular expressions applied one after another, each match and each gap a piece.
    gpt2: pieces are then cut by GPT-2's own expression.  digits: each digit stands alone first.
    nfc: text is normalised to NFC.  ignore_merges: a piece that is a token is taken whole.
    add_bos: whether a file without ``add_bos_token`` means that BOS is added.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)


_FAMILIES: Sequence[tuple[str, PreTokenization]] = (
    (
        "default gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0"
        " roberta-bpe jina-es jina-de jina-v2-es jina-v2-de",
        PreTokenization(gpt2=True),
    ),
    ("modern-bert", PreTokenization(gpt2=True, nfc=True)),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenization(gpt2=True, digits=True),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenization((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe glm4", PreTokenization((_LLAMA3,))),
    ("qwen2 stablelm2", PreTokenization((_QWEN2,), nfc=True)),
    ("qwen35", PreTokenization((_QWEN35,), nfc=True)),
    (
        "deepseek-r1-qwen megrez kormo f2llmv2 hunyuan solar-open grok-2",
        PreTokenization((_QWEN2,)),
    ),
    ("tekken", PreTokenization((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenization((_GPT4O,))),
    ("deepseek-v3 hunyuan-dense", PreTokenization(_DEEPSEEK3)),
    ("deepseek-coder", PreTokenization(_DEEPSEEK_CODER)),
    ("seed-coder", PreTokenization((_SEED_CODER,))),
)

PRE_TOKENIZATIONS = {name: family for names, family in _FAMILIES for name in names.split()}


def pre_tokenization(name: str) -> PreTokenization:
    """Return the way of cutting text that ``tokenizer.ggml.pre`` calls *name*.

    Raises ModelError for an unknown name: guessing would give other ids than the model knows.
    """
    try:
        return PRE_TOKENIZATIONS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZATIONS))
        raise ModelError(
            f"the GGUF file's tokenizer.ggml.pre is {name!r}, which zlm does not know; pass the "
            f"original tokenizer with --tokenizer (a folder or a Hugging Face id). Known: {known}"
        ) from None
