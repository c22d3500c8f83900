"""load_spec of folders: EOS ids from every file, and sampling defaults (CASES 16 and 32)."""

from pathlib import Path
from typing import Any

import pytest
from config_files import LLAMA, spec_of, write
from tiny import CHAT_TEMPLATE, tiny_tokenizer, write_tokenizer

from zlm.config import GenerationDefaults
from zlm.errors import ConfigError, ModelError
from zlm.models.config import load_spec

# ------------------------------------------------------------------------- CASES 16: EOS and BOS


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 9]}, None, (7, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 7, 11]}, (7, 9, 11)),
        ({"eos_token_id": [7]}, {"eos_token_id": 8}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({}, {"eos_token_id": 8}, (8,)),
        ({}, {}, (2,)),  # Llama's own default, when nothing says anything
        ({"eos_token_id": [7, -1, 320, 99999]}, None, (7,)),  # the model has 320 tokens
    ],
)
def test_eos_ids_are_a_union(
    tmp_path: Path, config: dict, generation: dict | None, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    assert spec_of(tmp_path, **config).eos_token_ids == expected


def test_eos_null_is_none_at_all(tmp_path: Path) -> None:
    write(tmp_path, "config.json", LLAMA | {"eos_token_id": None})
    assert load_spec(tmp_path).eos_token_ids == ()


def test_eos_of_the_tokenizer_joins(tmp_path: Path) -> None:
    """eos_token and eot_token by name, as strings or objects, from every file that lists ids."""
    decoder = {
        "5": {"content": "<eos>", "special": True},
        "6": {"content": "<stop>", "special": True},
    }
    config = {"eos_token": {"content": "<eos>"}, "eot_token": "<stop>", "bos_token": "<eos>"}
    write(tmp_path, "tokenizer_config.json", config | {"added_tokens_decoder": decoder})
    ours = spec_of(tmp_path, eos_token_id=7, bos_token_id=3)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((7, 5, 6), 3)
    assert spec_of(tmp_path).bos_token_id == 5
    write(tmp_path, "tokenizer_config.json", {})
    write(tmp_path, "special_tokens_map.json", {"eos_token": "<|im_start|>"})
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert spec_of(tmp_path, eos_token_id=7).eos_token_ids == (7, 1)
    vocabulary = tiny_tokenizer().get_vocab()
    write(tmp_path, "special_tokens_map.json", {"eos_token": "Q"})
    assert spec_of(tmp_path, eos_token_id=7).eos_token_ids == (7, vocabulary["Q"])
    write(tmp_path, "special_tokens_map.json", {"eos_token": "absent"})
    assert spec_of(tmp_path, eos_token_id=7).eos_token_ids == (7,)


def test_end_of_turn_of_the_chat_template_joins(tmp_path: Path) -> None:
    """<|im_end|> ends a turn in the template, though every file names <|endoftext|> as EOS."""
    write_tokenizer(tmp_path, tiny_tokenizer(), eos_token="<|endoftext|>")
    assert spec_of(tmp_path, eos_token_id=0).eos_token_ids == (0, 2)
    write_tokenizer(tmp_path, tiny_tokenizer(), eos_token="<|endoftext|>", chat_template=None)
    assert spec_of(tmp_path, eos_token_id=0).eos_token_ids == (0,)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert spec_of(tmp_path, eos_token_id=0).eos_token_ids == (0, 2)
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    assert spec_of(tmp_path, eos_token_id=0).eos_token_ids == (0, 2)


# ------------------------------------------------------------- CASES 32: generation_config.json

SAMPLED = {
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.001,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "eos_token_id": [7, 8],
}
TAKEN = GenerationDefaults(
    temperature=0.1,
    top_k=1,
    top_p=0.001,
    min_p=0.05,
    repetition_penalty=1.05,
    max_new_tokens=2048,
)


def test_defaults_are_taken_as_written(tmp_path: Path) -> None:
    assert spec_of(tmp_path).generation == GenerationDefaults()
    write(tmp_path, "generation_config.json", SAMPLED)
    assert spec_of(tmp_path).generation == TAKEN
    unsaid = {key: value for key, value in SAMPLED.items() if key != "do_sample"}
    write(tmp_path, "generation_config.json", unsaid)
    assert spec_of(tmp_path).generation == TAKEN
    write(tmp_path, "generation_config.json", {"top_k": -1, "temperature": None})
    assert spec_of(tmp_path).generation == GenerationDefaults(top_k=0)


def test_a_greedy_file_gives_no_sampling_values(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", SAMPLED | {"do_sample": False})
    expected = GenerationDefaults(repetition_penalty=1.05, max_new_tokens=2048)
    assert spec_of(tmp_path).generation == expected


def test_none_ignores_defaults_but_not_eos(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", SAMPLED)
    spec_of(tmp_path, eos_token_id=3)
    for choice in ("none", "vllm"):
        ours = load_spec(tmp_path, generation_config=choice)
        assert ours.generation == GenerationDefaults()
        assert ours.eos_token_ids == (3, 7, 8)


def test_defaults_from_another_folder(tmp_path: Path) -> None:
    write(tmp_path / "other", "generation_config.json", {"temperature": 0.5, "eos_token_id": 9})
    write(tmp_path, "generation_config.json", SAMPLED)
    spec_of(tmp_path, eos_token_id=3)
    for choice in (tmp_path / "other", tmp_path / "other" / "generation_config.json"):
        ours = load_spec(tmp_path, generation_config=str(choice))
        assert ours.generation == GenerationDefaults(temperature=0.5)
        assert ours.eos_token_ids == (3, 9)
    with pytest.raises(ConfigError, match=r"--generation-config .*nowhere"):
        load_spec(tmp_path, generation_config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 2.5), ("temperature", "hot"), ("top_p", -0.1), ("top_k", -2),
        ("top_k", 1.5), ("min_p", 2), ("repetition_penalty", 0), ("max_new_tokens", 0),
        ("do_sample", 1),
    ],
)  # fmt: skip
def test_a_default_out_of_range_is_refused_at_start(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path, "generation_config.json", {key: value})
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} must be"):
        spec_of(tmp_path)
    assert load_spec(tmp_path, generation_config="none").generation == GenerationDefaults()
