"""Greedy answers of every newer family through the worker's runner: those of transformers.

Prompts of several sequences in chunks, then decodes beside one another; from one file and from
several, and from a GGUF file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runner_tables import Tables
from tiny import tiny_checkpoint, tiny_gguf
from worker_steps import join, tokens_of

from zlm.config import ModelSpec, kv_groups
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.weights.load import open_weights
from zlm.worker.model_runner import ModelRunner
from zlm.worker.slots import SlotTables

STEPS = 8
WITHOUT_GGUF = ("gemma4", "gpt_oss", "llama4")  # whose GGUF files are not read
# Of a GGUF file, which leaves it out (see test_config_gguf): what the folder must be like.
PLAIN = {"query_pre_attn_scalar": 32}
FAMILIES = {
    "gemma2": PLAIN,
    "gemma4": {},
    "gpt_oss": {},
    "llama4": {},
    "phi3": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"mlp_only_layers": []},
}


def runner_of(path: Path) -> tuple[ModelRunner, ModelSpec]:
    spec, ops = load_spec(path), CpuOps(torch.float32)
    model = registry.build(spec, open_weights(path, spec), ops=ops, max_model_len=128)
    groups = kv_groups(spec)
    caches = {
        layer: ops.allocate_cache(40, 16, group.num_kv_heads, group.head_dim, torch.float32)
        for group in groups
        for layer in group.layers
    }
    tables = SlotTables(
        num_slots=4,
        max_model_len=128,
        vocab_size=spec.vocab_size,
        num_groups=len(groups),
        block_size=16,
        device=ops.device,
    )
    layers, windows = [list(g.layers) for g in groups], [g.window_tokens for g in groups]
    runner = ModelRunner(
        model,
        [caches[layer] for layer in sorted(caches)],
        tables,
        group_layers=layers,
        windows=windows,
        block_size=16,
        vocab_size=spec.vocab_size,
    )
    return runner, spec


def greedy(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the continuation of each prompt: the first whole, the others in chunks of 20."""
    runner, spec = runner_of(path)
    tables = Tables(len(kv_groups(spec)))
    answers: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    joins = [join(slot, prompt) for slot, prompt in enumerate(prompts)]
    while any(len(answer) < STEPS for answer in answers):
        rows = []
        for slot, prompt in enumerate(prompts):
            length = len(prompt) + len(answers[slot])
            count = min(length - done[slot], 20 if slot else length)
            rows.append((slot, done[slot], count, int(done[slot] + count == length)))
            done[slot] += count
        tokens = iter(tokens_of(runner.execute(tables.message(rows, joins))))
        for slot, _, _, sampled in rows:
            if sampled:
                answers[slot].append(next(tokens))
        joins = []
    return [answer[:STEPS] for answer in answers]


def best_along(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the likeliest token at each place of *answer*: the answer itself, if it is greedy."""
    ids = torch.tensor([prompt + answer[:-1]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    weights = open_weights(path, load_spec(path))
    return {name: weights.get(name) for name in weights.names()}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "one", family, **FAMILIES[family])
    prompts = [list(range(20, 50)), list(range(100, 150)), [7]]
    answers = greedy(folder, prompts)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert best_along(model, prompt, answer) == answer
    model.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    whole, parts = tensors_of(folder), tensors_of(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    if family not in WITHOUT_GGUF:
        assert greedy(tiny_gguf(tmp_path / "m.gguf", folder), prompts) == answers
