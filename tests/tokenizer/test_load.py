"""Vocabularies from folders and GGUF files give the original tokenizer's ids (CASES 68, 74)."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from zlm.errors import BadRequest, ConfigError, ModelError
from zlm.tokenizer.gguf_vocabulary import build_tokenizer, chat_templates, derive_merges
from zlm.tokenizer.load import load_vocabulary
from zlm.tokenizer.pretokenizers import PRE_TOKENIZATIONS, pre_tokenization
from zlm.tokenizer.vocabulary import Vocabulary
from zlm.weights.gguf import GGUFFile

TEXTS = [
    "Hello, world!",
    "naïve café São Tomé Příliš žluťoučký kůň",
    "日本語のテスト 한국어 中文字符 ไทย ភាសាខ្មែរ مرحبا שלום",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 ∑∫ 𝔘𝔫𝔦",
    "12345 67890 3.14159 1,000,000 ٠١٢٣ ⅷ ²³",
    "def f(x):\n    return x**2\n\n\n  # done\t\ttab",
    "a  b   c    d     e",
    "   lead and trail   ",
    "<|im_start|>user\nHi<|im_end|>\n<start_of_turn>model\n",
    "it's we'll I'd THEY'RE can't",
    "<table><tr><td>x</td></tr></table>",
    " " * 40 + "y" + " " * 70,
    "\r\n\r\n windows\r\n\n\n\n\n",
    "https://example.com/?a=1&b=2#frag",
    "▁▁ literal ▁",
    "",
]


def random_texts(count: int) -> list[str]:
    choose = random.Random(1)
    alphabet = "abc XYZ012\n\t é日😀'.,<>|_▁-\u200d"
    return ["".join(choose.choices(alphabet, k=choose.randrange(1, 60))) for _ in range(count)]


def their_tokenizer(path: Path) -> Any:
    metadata = GGUFFile(str(path)).metadata
    keys = GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {
        k: metadata[f"tokenizer.{f}"] for f, k in keys.items() if f"tokenizer.{f}" in metadata
    }
    return convert_gguf_tokenizer(metadata["general.architecture"], fields)[0]


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_gguf_ids_equal_the_original_tokenizers(
    fixture: str, request: pytest.FixtureRequest, load_real: Callable[[Path], Vocabulary]
) -> None:
    path: Path = request.getfixturevalue(fixture)
    vocabulary = load_real(path)
    theirs = their_tokenizer(path)
    if fixture == "smollm2_path":
        # SmolLM2's own tokenizer.json cuts digits apart, which transformers' reader leaves out.
        theirs.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    for text in TEXTS + random_texts(300):
        if fixture == "gemma3_path" and "▁▁" in text:
            continue  # in Gemma's own tokenizer.json an added token, which their reader leaves out
        assert vocabulary.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


def test_smollm2_facts(smollm2_path: Path, load_real: Callable[[Path], Vocabulary]) -> None:
    vocabulary = load_real(smollm2_path)
    assert vocabulary.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
    assert vocabulary.special_tokens["eos_token"] == "<|im_end|>"
    assert vocabulary.encode("Hi", add_special_tokens=True) == [26843]  # add_bos_token is false
    for text in TEXTS + random_texts(300):
        assert vocabulary.decode(vocabulary.encode(text), skip_special_tokens=False) == text


def test_gemma3_facts(gemma3_path: Path, load_real: Callable[[Path], Vocabulary]) -> None:
    vocabulary = load_real(gemma3_path)
    # add_bos_token is true in the file: without a BOS Gemma speaks nonsense.
    assert vocabulary.encode("Hello", add_special_tokens=True) == [2, 9259]
    assert vocabulary.encode("Hello") == [9259]
    turn = vocabulary.encode("<start_of_turn>user\nHi<end_of_turn>\n")
    assert turn[0] == 105
    assert turn[-2:] == [106, 107]
    assert vocabulary.encode("  ") == [138]
    assert vocabulary.special_tokens["bos_token"] == "<bos>"
    assert vocabulary.chat_templates == {}  # a base model
    for text in TEXTS + random_texts(300):
        if "▁" not in text:  # which stands for a space in this vocabulary
            assert vocabulary.decode(vocabulary.encode(text), skip_special_tokens=False) == text


def test_a_vocabulary_of_262144_tokens_loads_in_seconds(gemma3_path: Path) -> None:
    metadata = GGUFFile(str(gemma3_path)).metadata
    start = time.process_time()
    build_tokenizer(metadata)
    # About 1.7 s on an idle machine; the bound leaves room for a busy one.
    assert time.process_time() - start < 6


# ---------------------------------------------------------------------- GGUF, tiny


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * 259
    words = ["▁", "t", "h", "e", "th", "the", "▁the", "he", "a", "b", "ab", "<tool>", "  "]
    for k, word in enumerate(words):
        tokens.append(word)
        scores.append(-float(k))
        types.append(4 if word in ("<tool>", "  ") else 1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{k}": v for k, v in more.items()},
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


def test_sentencepiece_rules() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata())
    # BOS and the prefix space are the rule when the file says nothing.
    assert pieces(tokenizer, "the") == ["<s>", "▁the"]
    assert tokenizer.decode([1, tokenizer.token_to_id("▁the")]) == "the"
    tokenizer = build_tokenizer(
        sentencepiece_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    )
    assert pieces(tokenizer, "the") == ["the", "</s>"]
    assert pieces(tokenizer, "é")[:-1] == ["<0xC3>", "<0xA9>"]
    assert pieces(tokenizer, "a<tool>b</s>") == ["a", "<tool>", "b", "</s>", "</s>"]
    assert pieces(tokenizer, "a  the")[:-1] == ["a", "▁▁", "the"]


def test_merges_follow_the_scores() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    merges = derive_merges(tokens, [0, 0, 0, -2, -1, -3], [1] * 6)
    assert merges == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


def byte_level_metadata(pre: str | None, **more: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False, special_tokens=["<s>"]
    )
    tokenizer.train_from_iterator(TEXTS * 3 + ["1234 5678 2024 it's We'LL"] * 9, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        **{f"tokenizer.ggml.{k}": v for k, v in more.items()},
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZATIONS))
def test_every_known_way_of_cutting_loses_nothing(pre: str) -> None:
    tokenizer = build_tokenizer(byte_level_metadata(pre, add_bos_token=False))
    for text in TEXTS + random_texts(20):
        if "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("gpt-2", "ab 123's  x", ["ab", " 123", "'s", " ", " x"]),
        ("smollm", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("llama-bpe", "A 12345'LL\n\nx", ["A", " ", "123", "45", "'LL", "\n\n", "x"]),
        ("qwen2", "A 123,b", ["A", " ", "1", "2", "3", ",b"]),
        ("tekken", "FooBar/x", ["Foo", "Bar", "/x"]),
        ("gpt-4o", "FooBar's 1234", ["Foo", "Bar's", " ", "123", "4"]),
        ("deepseek-v3", "ab1234漢字", ["ab", "123", "4", "漢字"]),
        ("seed-coder", "x;\ny12", ["x", ";", "\n", "y", "1", "2"]),
    ],
)
def test_where_text_is_cut(pre: str, text: str, cut: list[str]) -> None:
    found = pre_tokenization(pre).pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == cut


def test_flags_that_come_with_the_way_of_cutting() -> None:
    assert build_tokenizer(byte_level_metadata("llama-bpe")).encode("a").ids[0] == 0  # BOS
    assert build_tokenizer(byte_level_metadata("qwen2")).encode("a").ids[0] != 0
    assert build_tokenizer(byte_level_metadata(None)).encode("a").ids[0] != 0
    composed, decomposed = "é", "e\u0301"
    qwen2 = build_tokenizer(byte_level_metadata("qwen2"))
    assert qwen2.encode(decomposed).ids == qwen2.encode(composed).ids


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (byte_level_metadata("no-such"), "'no-such'.*--tokenizer"),
        ({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": []}, "'rwkv'.*--tokenizer"),
        ({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": []}, "no tokenizer.ggml.scores"),
        ({}, "no vocabulary"),
        (
            {**sentencepiece_metadata(add_bos_token=True), "tokenizer.ggml.bos_token_id": None},
            "BOS",
        ),
    ],
)
def test_what_is_not_known_is_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build_tokenizer(metadata)


def test_chat_templates_of_a_gguf_file() -> None:
    metadata = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B",
                "tokenizer.chat_templates": ["tool_use"]}  # fmt: skip
    assert chat_templates(metadata) == {"default": "A", "tool_use": "B"}


# ---------------------------------------------------------------------- folders


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "no_prefix", "metaspace"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True}])
def test_folders_equal_transformers(
    save_folder: Callable[..., Path], kind: str, flags: dict[str, bool]
) -> None:
    named = {"bos_token": "<|endoftext|>"} if kind == "byte_level" else {}
    folder = save_folder(kind, tokenizer_class="PreTrainedTokenizerFast", **named, **flags)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    vocabulary = load_vocabulary(str(folder))
    for text in TEXTS + random_texts(50):
        for add in (True, False):
            ours = vocabulary.encode(text, add_special_tokens=add)
            assert ours == theirs(text, add_special_tokens=add)["input_ids"]
    assert vocabulary.special_tokens["eos_token"] == theirs.eos_token


def test_tokens_that_only_the_config_names(save_folder: Callable[..., Path]) -> None:
    plain = load_vocabulary(str(save_folder()))
    size = plain.size
    declared = {
        str(size): {"content": "<|tool|>", "special": True},
        str(size + 1): {"content": "<x>", "special": False},
    }
    folder = save_folder(
        added_tokens_decoder=declared,
        additional_special_tokens=["<|tool|>", "<think>"],
        pad_token={"content": "<|endoftext|>", "special": True},
    )
    vocabulary = load_vocabulary(str(folder))
    assert vocabulary.encode("<|tool|><x>") == [size, size + 1]
    assert size in vocabulary.special_ids
    assert vocabulary.tokenizer.token_to_id("<think>") in vocabulary.special_ids
    assert vocabulary.special_tokens["pad_token"] == "<|endoftext|>"
    assert vocabulary.special_tokens["additional_special_tokens"] == ["<|tool|>", "<think>"]


def test_where_chat_templates_come_from(save_folder: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    folder = save_folder(chat_template=named)
    assert load_vocabulary(str(folder)).chat_templates == {"default": "D", "rag": "R"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    (folder / "chat_template.jinja").write_text("FILE")
    templates = load_vocabulary(str(folder)).chat_templates
    assert templates == {"default": "FILE", "rag": "R", "tool_use": "T"}
    assert load_vocabulary(str(folder), chat_template="{{ 1 }}").chat_templates == {
        "default": "{{ 1 }}"
    }
    (folder / "mine.jinja").write_text("MINE")
    chosen = load_vocabulary(str(folder), chat_template=str(folder / "mine.jinja"))
    assert chosen.chat_templates == {"default": "MINE"}
    with pytest.raises(ConfigError, match=r"--chat-template nothing\.jinja"):
        load_vocabulary(str(folder), chat_template="nothing.jinja")


def test_folders_that_cannot_be_served_say_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_vocabulary(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.model but no tokenizer\.json.*convert"):
        load_vocabulary(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_vocabulary(str(tmp_path))
    with pytest.raises(ModelError, match="neither a folder"):
        load_vocabulary(str(tmp_path / "tokenizer.model"))
    with pytest.raises(ModelError, match="no tokenizer at"):
        load_vocabulary(str(tmp_path / "nothing"))


def test_lone_surrogates_are_refused(vocabularies: dict[str, Vocabulary]) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        vocabularies["byte_level"].encode("\ud83d")


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "no_prefix", "metaspace"])
def test_a_lower_bound_of_a_long_texts_tokens(
    vocabularies: dict[str, Vocabulary], kind: str
) -> None:
    vocabulary = vocabularies[kind]
    text = "The quick brown fox is in Paris. " * 4000
    count = len(vocabulary.encode(text))
    assert 0 <= vocabulary.least_tokens(text) <= count
    assert vocabulary.encode(vocabulary.tail(text, 50))[-50:] == vocabulary.encode(text)[-50:]
