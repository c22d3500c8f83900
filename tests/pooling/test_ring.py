"""Requests for vectors through tokenizer, engine core and worker: checks, budgets, ends.

CASES 33: ids out of the vocabulary. CASES 43: at the limit and over it. CASES 112: nothing is cut
in silence.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled_engine import PooledEngine, resolved_for
from tiny_embedders import hidden_states, reference, tiny_embedder

from zlm.errors import BadRequest, ConfigError, ModelError
from zlm.frontend.openai.embeddings import check_vectors
from zlm.messages import Cancel, Failed, Generate, Pool
from zlm.models.config import load_spec
from zlm.pooling_params import PoolingParams
from zlm.sampling_params import SamplingParams
from zlm.scores import Pairs, pooled_texts


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PooledEngine:
    folder = tmp_path_factory.mktemp("encoder") / "m"
    tiny_embedder(folder, "bert", modules=("mean", "normalize"))
    return PooledEngine(folder, max_model_len=100, max_num_seqs=8, max_num_batched_tokens=120)


def refusal(engine: PooledEngine, prompts: list[Any], **params: Any) -> Failed:
    """Return the error of a request that is refused before anything is computed."""
    assert engine.pool_all([(prompts, [], params)]) == [None]
    assert engine.steps == [] and engine.tokenizer.open_requests == 0
    return engine.refused[0]


def test_steps_keep_the_budget_and_rows_whole(encoder: PooledEngine) -> None:
    """No more tokens a step than the budget, no sequence in two steps, more slots than eight."""
    lengths = [90, 10, 50, 70, 1, 1, 100, *[3] * 20]
    encoder.pool([[7] * length for length in lengths])
    assert sum(encoder.steps) == sum(lengths)
    assert max(encoder.steps) <= 120


def test_too_long_is_refused_and_never_cut(encoder: PooledEngine) -> None:
    """CASES 43 and 112: at the limit all tokens count, over it 400 with both numbers."""
    ids = [5 + i % 200 for i in range(101)]
    [whole, same_start] = encoder.pool([ids[:100], [*ids[:99], 4]])
    assert np.abs(whole - same_start).max() > 1e-4
    failed = refusal(encoder, [ids])
    assert failed.status == 400 and failed.code == "context_length_exceeded"
    assert "101" in failed.message and "100" in failed.message and failed.param == "input"
    failed = refusal(encoder, [[5], "word " * 300])
    assert failed.code == "context_length_exceeded"


def test_truncation_is_asked_for(encoder: PooledEngine) -> None:
    """The frame of special tokens is kept: BOS, as many of the first tokens as fit, EOS."""
    text = "the quick brown fox jumps over the lazy dog " * 20
    ids = encoder.tokenizer.vocabulary.encode(text)
    framed = [1, *ids[:8], 2]
    expected = encoder.pool([framed])[0]
    assert np.array_equal(encoder.pool([text], truncate_prompt_tokens=10)[0], expected)
    assert np.array_equal(
        encoder.pool([text], truncate_prompt_tokens=-1)[0],
        encoder.pool([[1, *ids[:98], 2]])[0],
    )
    cut = encoder.pool([[7, 8, 9]], truncate_prompt_tokens=2)[0]
    assert np.array_equal(cut, encoder.pool([[7, 8]])[0])
    for wrong in (0, -2):
        failed = refusal(encoder, ["a"], truncate_prompt_tokens=wrong)
        assert failed.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("ids", [[-1], [320], [2**62], [5, 320, 6]])
def test_ids_out_of_the_vocabulary(encoder: PooledEngine, ids: list[int]) -> None:
    """CASES 33."""
    failed = refusal(encoder, [ids])
    assert failed.status == 400 and "vocabulary" in failed.message
    assert len(encoder.pool([[0], [319]])) == 2


def test_an_empty_text_is_its_frame_and_empty_ids_are_refused(encoder: PooledEngine) -> None:
    assert np.array_equal(encoder.pool([""])[0], encoder.pool([[1, 2]])[0])
    assert refusal(encoder, [[]]).param == "input"
    assert refusal(encoder, []).param == "input"
    assert "surrogate" in refusal(encoder, ["\ud800"]).message


def test_requests_at_once_do_not_mix(encoder: PooledEngine) -> None:
    requests = [([[i, i + 1], [i]], [], {}) for i in range(3, 40)]
    together = encoder.pool_all(requests)
    for i in (0, 17, 36):
        alone = encoder.pool(requests[i][0])
        for ours, theirs in zip(together[i], alone, strict=True):
            assert np.abs(ours - theirs).max() < 1e-6


def test_a_cancelled_request_ends_in_silence(encoder: PooledEngine) -> None:
    encoder.tokenizer.handle(Pool(900, 0.0, [[5, 6]], PoolingParams()))
    assert encoder.tokenizer.open_requests == 1
    encoder.tokenizer.handle(Cancel(900))
    assert encoder.tokenizer.open_requests == 0
    assert len(encoder.pool([[5]])) == 1


def test_text_is_refused(encoder: PooledEngine) -> None:
    generate = Generate(901, 0.0, ["a"], SamplingParams())
    encoder.tokenizer.handle(generate)
    failed = encoder._answers[901]
    assert isinstance(failed, Failed) and failed.status == 400
    assert "generates no text" in failed.message


def test_dimensions_only_where_the_model_was_trained_for_them(tmp_path: Path) -> None:
    folder = tiny_embedder(
        tmp_path / "m", "bert", modules=("mean", "normalize"), matryoshka_dimensions=[8, 16, 48]
    )
    engine = PooledEngine(folder)
    whole = engine.pool([[5, 6, 7]], normalize=False)[0]
    cut = engine.pool([[5, 6, 7]], dimensions=16)[0]
    assert cut.shape == (16,) and abs(np.linalg.norm(cut) - 1.0) < 1e-6
    assert np.abs(cut - whole[:16] / np.linalg.norm(whole[:16])).max() < 1e-6
    assert engine.pool([[5]], dimensions=48)[0].shape == (48,)
    for wrong in (0, 7, 32, 49):
        failed = refusal(engine, [[5]], dimensions=wrong)
        assert failed.param == "dimensions" and failed.status == 400


def test_a_model_without_shorter_vectors_says_so(encoder: PooledEngine) -> None:
    assert encoder.pool([[5]], dimensions=48)[0].shape == (48,)
    assert "not trained for shorter" in refusal(encoder, [[5]], dimensions=24).message


def test_prompts_of_the_model(tmp_path: Path) -> None:
    """A prompt by name, and the default one, precede each text; ids are taken as they are."""
    folder = tiny_embedder(tmp_path / "m", "bert", modules=("mean",))
    prompts = {"query": "query: ", "passage": "text: "}
    settings = {"prompts": prompts, "default_prompt_name": "passage"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    engine = PooledEngine(folder)
    encode = engine.tokenizer.vocabulary.encode

    def expected(text: str) -> np.ndarray:
        return engine.pool([encode(text, add_special_tokens=True)])[0]

    assert np.array_equal(engine.pool(["a dog"])[0], expected("text: a dog"))
    assert np.array_equal(engine.pool(["a dog"], prompt_name="query")[0], expected("query: a dog"))
    failed = refusal(engine, ["a"], prompt_name="other")
    assert failed.param == "prompt_name" and "passage, query" in failed.message


def test_the_window_is_what_the_module_files_say(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "bert", modules=("mean",))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert resolved_for(folder, {}).max_model_len == 40
    assert resolved_for(folder, {}, max_model_len=130).max_model_len == 130
    with pytest.raises(ConfigError, match="130 tokens"):
        resolved_for(folder, {}, max_model_len=131)


def test_a_causal_embedder_uses_the_prefix_cache(tmp_path: Path) -> None:
    """The last token's vector needs only what the cache holds; a mean needs every token."""
    ids = [5 + i % 200 for i in range(70)]
    for pooling, computed in (("lasttoken", 6), ("mean", 70)):
        folder = tiny_embedder(tmp_path / pooling, "qwen3", modules=(pooling,))
        engine = PooledEngine(folder)
        first = engine.pool([ids])[0]
        again = engine.pool([ids])[0]
        assert sum(engine.steps) == computed
        assert np.abs(first - again).max() < 1e-5
        kind = pooling.removesuffix("token")
        assert np.abs(first - reference(folder, ids, kind)).max() < 1e-4
        [tokens] = engine.pool([ids], task="token_embed", normalize=False)
        assert sum(engine.steps) == 70, "a vector of every token needs every token"
        assert np.abs(tokens.reshape(70, -1) - hidden_states(folder, ids)).max() < 1e-4


def test_a_model_of_tokens_has_no_vector_of_a_whole(tmp_path: Path) -> None:
    """ColBERT's kind and a classifier of tokens: tasks and cuts they lack; a tagger's score."""
    late = PooledEngine(tiny_embedder(tmp_path / "a", "bert", modules=("dense",)))
    assert "offers token_embed" in refusal(late, [[5]], task="embed").message
    assert refusal(late, [[5]], dimensions=8).param == "dimensions"
    tags = PooledEngine(tiny_embedder(tmp_path / "b", "bert-tokens", num_labels=3))
    assert "offers token_classify" in refusal(tags, [[5]], task="classify").message
    assert "scores" in refusal(tags, [[5]], dimensions=3).message
    for engine in (late, tags):
        pooling = engine.resolved.spec.pooling
        assert pooling is not None and pooling.kind == "tokens"
        with pytest.raises(BadRequest, match="use /pooling"):
            check_vectors(engine.resolved)
    with pytest.raises(BadRequest, match="no score of texts"):
        pooled_texts(Pairs(["a"], ["b"]), pooling)


def test_values_that_are_no_numbers_fail_their_request_alone(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "bert", modules=("mean",))
    engine = PooledEngine(folder)
    with torch.inference_mode():
        engine.runner._model.tokens[7] = float("nan")
    found = engine.pool_all([([[5, 6]], [], {}), ([[8], [7]], [], {}), ([[9]], [], {})])
    assert found[0] is not None and found[1] is None and found[2] is not None
    assert engine.refused[0].status == 500 and "not numbers" in engine.refused[0].message


CONTRADICTIONS: list[tuple[str, dict[str, str], str]] = [
    ("bert", {"runner": "generate"}, "it generates no text"),
    ("bert", {"task": "classify"}, "no classification head"),
    ("bert-classifier", {"task": "embedding"}, "it scores"),
    ("llama", {"task": "generate", "runner": "pooling"}, "contradict"),
]


@pytest.mark.parametrize(("family", "options", "words"), CONTRADICTIONS)
def test_contradictions(tmp_path: Path, family: str, options: dict[str, str], words: str) -> None:
    folder = tiny_embedder(tmp_path / "m", family)
    with pytest.raises(ConfigError, match=words):
        resolved_for(folder, {}, **options)


def test_an_encoder_wants_room_for_a_whole_sequence(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "bert")
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 64 .*those after them"):
        resolved_for(folder, {"max_num_batched_tokens": 64})
    assert resolved_for(folder, {}).kv_groups == ()


def damage_pooling(folder: Path) -> None:
    config = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def damage_modules(folder: Path) -> None:
    entries = [{"type": "sentence_transformers.models.LSTM", "path": "1_LSTM"}]
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("damage", [damage_pooling, damage_modules])
def test_modules_that_are_not_supported(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = tiny_embedder(tmp_path / "m", "bert", modules=("mean",))
    damage(folder)
    with pytest.raises(ModelError, match="not supported"):
        load_spec(folder)
