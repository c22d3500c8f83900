"""Incremental detokenization equals the decode of all ids at once (CASES 1, 2, 3)."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from zlm.tokenizer.detokenize import detokenizer
from zlm.tokenizer.token_table import TokenTable
from zlm.tokenizer.vocabulary import Vocabulary

KINDS = ["byte_level", "sentencepiece", "no_prefix", "metaspace"]


def streamed(table: TokenTable, ids: list[int], **options: bool) -> list[str]:
    sequence = detokenizer(table, **options)
    return [*map(sequence.push, ids), sequence.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_pushes_equal_the_one_shot_decode(
    vocabularies: dict[str, Vocabulary], kind: str, data: st.DataObject, skip: bool
) -> None:
    vocabulary = vocabularies[kind]
    # Beyond the vocabulary too: models have more rows than tokenizers have tokens.
    ids = data.draw(st.lists(st.integers(0, vocabulary.size + 3), max_size=24))
    texts = streamed(TokenTable(vocabulary), ids, skip_special_tokens=skip)
    assert "".join(texts) == vocabulary.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_no_push_shows_a_half_character(
    vocabularies: dict[str, Vocabulary], kind: str, text: str
) -> None:
    vocabulary = vocabularies[kind]
    texts = streamed(TokenTable(vocabulary), vocabulary.encode(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in texts)
    for piece in texts:
        piece.encode()  # no lone surrogate


def test_a_character_cut_between_tokens_comes_out_whole(
    vocabularies: dict[str, Vocabulary],
) -> None:
    vocabulary = vocabularies["byte_level"]
    ids = [vocabulary.tokenizer.token_to_id(c) for c in "ðŁĺĢ"]  # the bytes of 😀
    assert streamed(TokenTable(vocabulary), ids) == ["", "", "", "😀", ""]


def test_a_cut_character_is_flushed_as_one_mark(vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies["byte_level"]
    ids = [vocabulary.tokenizer.token_to_id(c) for c in "ðŁĺ"]
    assert streamed(TokenTable(vocabulary), ids) == ["", "", "", "�"]
    assert vocabulary.decode(ids, skip_special_tokens=True) == "�"


def test_a_continued_text_keeps_its_leading_space(vocabularies: dict[str, Vocabulary]) -> None:
    for kind in ("sentencepiece", "metaspace"):
        vocabulary = vocabularies[kind]
        ids = [vocabulary.tokenizer.token_to_id("▁Paris")]
        table = TokenTable(vocabulary)
        assert "".join(streamed(table, ids, continues=True)) == " Paris"
        assert "".join(streamed(table, ids)) == "Paris"


def test_a_table_has_the_text_of_whole_tokens_alone(vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies["byte_level"]
    table = TokenTable(vocabulary)
    part, whole = (vocabulary.tokenizer.token_to_id(c) for c in "ða")
    assert table.texts[part] is None and table.shown_texts[part] is None
    assert table.texts[whole] == table.shown_texts[whole] == "a"
    assert (table.texts[2], table.shown_texts[2]) == ("<|im_end|>", "")
    assert table.texts[vocabulary.size + 3] == ""  # a row of the model without a token


def test_special_tokens_are_shown_only_when_asked(vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies["byte_level"]
    ids = [*vocabulary.encode("a"), 2]
    table = TokenTable(vocabulary)
    assert "".join(streamed(table, ids)) == "a"
    assert "".join(streamed(table, ids, skip_special_tokens=False)) == "a<|im_end|>"


def test_names_and_bytes_of_tokens(vocabularies: dict[str, Vocabulary]) -> None:
    table = TokenTable(vocabularies["byte_level"])
    half = vocabularies["byte_level"].tokenizer.token_to_id("ð")
    assert (table.name(2), table.shown_bytes(2)) == ("<|im_end|>", b"<|im_end|>")
    assert (table.name(half), table.shown_bytes(half)) == ("�", b"\xf0")
    table = TokenTable(vocabularies["no_prefix"])
    byte = vocabularies["no_prefix"].tokenizer.token_to_id("<0xF0>")
    space = vocabularies["no_prefix"].tokenizer.token_to_id("▁Paris")
    assert (table.name(byte), table.shown_bytes(byte)) == ("�", b"\xf0")
    assert (table.name(space), table.shown_bytes(space)) == (" Paris", b" Paris")


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_real_vocabularies(
    fixture: str, request: pytest.FixtureRequest, load_real: Callable[[Path], Vocabulary]
) -> None:
    vocabulary = load_real(request.getfixturevalue(fixture))
    table = TokenTable(vocabulary)
    choose = random.Random(7)
    for trial in range(400):
        high = 500 if trial % 2 else vocabulary.size  # low ids: bytes and special tokens
        ids = [choose.randrange(high) for _ in range(choose.randrange(16))]
        for skip in (True, False):
            texts = streamed(table, ids, skip_special_tokens=skip)
            assert "".join(texts) == vocabulary.decode(ids, skip_special_tokens=skip)
