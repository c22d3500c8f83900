"""Every family's logits against transformers, in float32, through every way to compute them."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from paged_steps import PagedSequences
from tiny import tiny_checkpoint

from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.weights.load import open_weights

TOLERANCE = 1e-4

# name: (family, options of tiny_checkpoint)
CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-3-heads-a-kv-head": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "llama-wide-heads": ("llama", {"head_dim": 40}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope": "linear"}),
    "llama-llama3": ("llama", {"rope": "llama3"}),
    "llama-yarn": ("llama", {"rope": "yarn"}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "llama4": ("llama4", {}),
    "llama4-multimodal": ("llama4_multimodal", {}),
    "llama4-of-dense-ends": (
        "llama4",
        {
            "moe_layers": [1, 2],
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "no_rope_layers": [0, 1, 1, 0],
        },
    ),
    "llama4-yarn": ("llama4", {"rope": "yarn"}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "smollm3": ("smollm3", {}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-softcaps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3", {}),
    "gemma4": ("gemma4", {}),
    "gemma4-multimodal": ("gemma4_multimodal", {}),
    "gemma4-keys-as-values": (
        "gemma4",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma3-linear": ("gemma3", {"rope": "linear"}),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 3.0}),
    "gemma3-multimodal": ("gemma3_multimodal", {}),
}


class Golden:
    """A tiny checkpoint in both implementations."""

    def __init__(self, folder: Path, max_model_len: int = 512) -> None:
        self.spec = load_spec(folder)
        weights = open_weights(folder, self.spec)
        self.model = registry.build(
            self.spec, weights, ops=CpuOps(torch.float32), max_model_len=max_model_len
        )
        auto = transformers.AutoModelForCausalLM
        if (folder / "config.json").read_text().find("vision_config") >= 0:
            auto = transformers.AutoModelForImageTextToText
        reference = auto.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # Without an image transformers' whole of Llama 4 fails: its text half is asked.
        self.reference = getattr(reference, "language_model", reference)

    def sequences(self, seed: int = 0) -> PagedSequences:
        return PagedSequences(self.model, self.spec, seed=seed)

    def expected(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(input_ids=torch.tensor([ids])).logits[0].float()

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return random.Random(seed).choices(range(10, self.spec.vocab_size), k=length)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    family, options = CHECKPOINTS[request.param]
    return Golden(tiny_checkpoint(tmp_path_factory.mktemp("golden"), family, **options))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_whole_prefill(golden: Golden) -> None:
    ids = golden.prompt(75)
    (logits,) = golden.sequences().step([(0, ids)])
    assert logits.dtype == torch.float32
    assert_close(logits, golden.expected(ids))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(golden: Golden, chunk: int) -> None:
    ids = golden.prompt(60)
    sequences = golden.sequences(seed=chunk)
    pieces = [sequences.step([(0, ids[start : start + chunk])])[0] for start in range(0, 60, chunk)]
    assert_close(torch.cat(pieces), golden.expected(ids))


def test_decodes_beside_prefills(golden: Golden) -> None:
    """Sequences of mixed lengths join one after another and decode beside others' chunks."""
    lengths = [5, 70, 33, 1, 50, 50]
    prompts = {i: golden.prompt(length + 12, seed=i) for i, length in enumerate(lengths)}
    chunks = {i: [5, 40, 33, 1, 50, 17][i] for i in prompts}
    sequences = golden.sequences()
    got: dict[int, list[torch.Tensor]] = {i: [] for i in prompts}
    done = dict.fromkeys(prompts, 0)
    for tick in range(100):
        rows = []
        for i, ids in prompts.items():
            if i > tick or done[i] == len(ids):
                continue
            count = min(chunks[i], lengths[i] - done[i]) if done[i] < lengths[i] else 1
            rows.append((i, ids[done[i] : done[i] + count]))
        if not rows:
            break
        rows.sort(key=lambda row: len(row[1]) > 1)
        for (i, ids), logits in zip(rows, sequences.step(rows), strict=True):
            got[i].append(logits)
            done[i] += len(ids)
    for i, ids in prompts.items():
        assert_close(torch.cat(got[i]), golden.expected(ids))


def test_prompts_of_one_length_together(golden: Golden) -> None:
    prompts = [golden.prompt(20, seed=i) for i in range(3)] + [golden.prompt(9, seed=9)]
    for ids, logits in zip(prompts, golden.sequences().step(list(enumerate(prompts))), strict=True):
        assert_close(logits, golden.expected(ids))


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(("max_model_len", "length"), [(64, 40), (512, 90)])
def test_longrope(tmp_path: Path, family: str, max_model_len: int, length: int) -> None:
    """transformers picks the list by the sequence, zlm by its limit: here both mean the same."""
    keys = {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}
    folder = tiny_checkpoint(
        tmp_path, family, rope="longrope", **(keys if family == "phi3" else {})
    )
    golden = Golden(folder, max_model_len)
    ids = golden.prompt(length)
    (logits,) = golden.sequences().step([(0, ids)])
    assert_close(logits, golden.expected(ids))


def test_longrope_does_not_change_its_list_on_the_way(tmp_path: Path) -> None:
    """A sequence that grows over the original window ends as if computed at once (CASES 106)."""
    golden = Golden(tiny_checkpoint(tmp_path, "llama", rope="longrope"))
    ids = golden.prompt(80)
    sequences = golden.sequences()
    sequences.step([(0, ids[:50])])
    logits = torch.cat([sequences.step([(0, [token])])[0] for token in ids[50:]])
    assert_close(logits[15:], golden.expected(ids)[65:])
