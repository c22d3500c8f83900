"""lm-eval: likelihoods over HTTP are those of its own Hugging Face backend, to 1e-3.

Both get the same dequantised SmolLM2 in float32 and the same tokenizer: the server by way of its
GGUF file, the reference as a transformers model, the tokenizer from a folder saved from that file.
The tasks are made here, from the text beside this file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")
pytest.importorskip("aiohttp", reason="lm-eval's local-completions backend needs lm-eval[api]")

import transformers_reference  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

TEXT = Path(__file__).with_name("lighthouse.txt")
WINDOW = 96  # tokens a likelihood may look at: the text needs several
TOLERANCE = 1e-3
QUESTIONS = [
    ("The capital of France is", ["Paris", "Berlin", "a river", "seven"], 0),
    ("Two plus two is", ["a tree", "four", "Monday", "nine"], 1),
    ("Water freezes into", ["iron", "smoke", "ice", "bread"], 2),
    ("A baby dog is called a", ["calf", "kitten", "foal", "puppy"], 3),
    ("Bees make", ["honey", "glass", "coal", "paper money"], 0),
    ("In der Nacht scheint der", ["Käse", "Mond", "Größe", "Löffel"], 1),
    ("The opposite of hot is", ["warm", "spicy", "cold", "a 🔥"], 2),
    ("def add(a, b):\n    return", ["print", "a - c", "None()", "a + b"], 3),
]


@pytest.fixture(scope="module")
def tokenizer_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def reference(smollm2_path: Path, tokenizer_folder: Path) -> Any:
    """lm-eval's Hugging Face backend."""
    from lm_eval.models.huggingface import HFLM

    model = transformers_reference.load(smollm2_path, torch.float32, "cpu").model
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=WINDOW, batch_size=4)


@pytest.fixture(scope="module")
def over_http(base_url: str, tokenizer_folder: Path) -> Any:
    """lm-eval's local-completions backend: token ids with echo and logprobs, four at once."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{base_url}/completions",
        model="smol",
        tokenizer=str(tokenizer_folder),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        num_concurrent=4,
        batch_size=2,
        max_retries=1,
        max_length=WINDOW + 2,  # it counts the token it must ask for, and the one in front
    )


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run one task, whose documents are *rows*, with a backend; return lm-eval's results."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    manager = TaskManager(include_defaults=False)

    def run(backend: Any, name: str, rows: list[dict[str, Any]], **task: Any) -> Any:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder)},
            "test_split": "test",
            "metadata": {"version": 1},
            **task,
        }
        return lm_eval.simple_evaluate(
            model=backend, tasks=[config], task_manager=manager, bootstrap_iters=0
        )

    return run


def test_multiple_choice(evaluate: Any, over_http: Any, reference: Any) -> None:
    rows = [{"query": q, "choices": c, "gold": gold} for q, c, gold in QUESTIONS]
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    ours, theirs = (evaluate(each, "choices", rows, **task) for each in (over_http, reference))
    pairs = list(zip(ours["samples"]["choices"], theirs["samples"]["choices"], strict=True))
    assert len(pairs) == len(QUESTIONS)
    for mine, other in pairs:
        assert mine["doc"] == other["doc"]
        likelihoods = [value for value, _ in mine["filtered_resps"]]
        expected = [value for value, _ in other["filtered_resps"]]
        assert likelihoods == pytest.approx(expected, abs=TOLERANCE) and max(expected) < 0
        assert [g for _, g in mine["filtered_resps"]] == [g for _, g in other["filtered_resps"]]
    accuracy = ours["results"]["choices"]["acc,none"]
    assert accuracy == theirs["results"]["choices"]["acc,none"]
    assert accuracy >= 0.75  # chance is 0.25


def test_perplexity_of_a_text(evaluate: Any, over_http: Any, reference: Any) -> None:
    """Rolling: windows of the whole text, each with the token before it as its context."""
    rows = [{"page": TEXT.read_text()}]
    task = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "page",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    ours, theirs = (evaluate(each, "pages", rows, **task) for each in (over_http, reference))
    (mine,), (other,) = ours["samples"]["pages"], theirs["samples"]["pages"]
    (total,), (expected,) = mine["filtered_resps"], other["filtered_resps"]
    num_tokens = len(reference.tok_encode(rows[0]["page"]))
    assert num_tokens > 3 * WINDOW and expected < -num_tokens
    assert total / num_tokens == pytest.approx(expected / num_tokens, abs=TOLERANCE / 50)
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        value = ours["results"]["pages"][metric]
        assert value == pytest.approx(theirs["results"]["pages"][metric], rel=TOLERANCE)
        assert value > 0.1


def test_generation_until(evaluate: Any, over_http: Any, reference: Any) -> None:
    rows = [{"query": query, "gold": choices[gold]} for query, choices, gold in QUESTIONS[:4]]
    task = {
        "output_type": "generate_until",
        "doc_to_text": "query",
        "doc_to_target": "gold",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    ours, theirs = (evaluate(each, "texts", rows, **task) for each in (over_http, reference))
    texts = [sample["resps"] for sample in ours["samples"]["texts"]]
    assert texts == [sample["resps"] for sample in theirs["samples"]["texts"]]
    assert any("Paris" in text for ((text,),) in texts)
