"""The GPU's runner on the card, with CUDA graphs, against the CPU's, on tiny random models.

Every family, type and head size; steps of every kind, each often enough to be replayed; servers of
one, five and 256 sequences as they are started, with their memory plan.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny_models import SPECS, RandomWeights
from worker_steps import entries_of, floats, ids, join, tokens_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import runner_pairs
from runner_pairs import Pair, Setting, Tables
from step_traffic import Traffic

from zlm.config import CacheOptions, ModelSpec
from zlm.worker import gpu_measure, gpu_memory, gpu_startup
from zlm.worker.dummy_weights import DummyWeights

CUDA = torch.device("cuda", 0)
VOCAB = 1000
SETTING = Setting(max_num_batched_tokens=256, max_model_len=320, num_blocks=600, device="cuda")
KV_BYTES = 384 * 2**20  # of a server: blocks are not given back here
LENGTHS = (70, 5, 33, 150, 17)  # of prompts; the window of the sliding layers is 60


def wider(name: str, head_dim: int, **facts: object) -> ModelSpec:
    """Return the tiny model *name*, wide enough for several tiles of every kernel."""
    spec = SPECS[name]
    return replace(
        spec,
        hidden_size=320,
        intermediate_size=704,
        vocab_size=VOCAB,
        head_dim=head_dim,
        max_position=512,
        layer_windows=tuple(10 * window for window in spec.layer_windows),
        **facts,
    )


MODELS = {
    "llama-64": wider("llama", 64),
    "qwen2-80": wider("qwen2", 80, num_heads=6, num_kv_heads=2),
    "qwen3-96": wider("qwen3", 96, num_kv_heads=4),
    "qwen3-128": wider("qwen3", 128, num_heads=8, num_kv_heads=1),
    "gemma3-256": wider("gemma3-softcaps", 256),
}


@pytest.fixture(autouse=True)
def stream() -> Iterator[None]:
    """A stream of the test's own: graphs cannot be captured on the default one."""
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):
        yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def pair_of(spec: ModelSpec, setting: Setting = SETTING) -> Pair:
    resolved = runner_pairs.resolved_for(spec, setting)
    weights = RandomWeights(spec)
    gpu = runner_pairs.assembled(resolved, weights, setting)
    cpu = runner_pairs.cpu_runner(resolved, weights, setting.num_blocks, setting.max_num_seqs)
    return Pair(gpu.runner, cpu, len(resolved.kv_groups))


# ------------------------------------------------------------------------------------ every family


def rounds(pair: Pair, count: int = 3) -> None:
    """The same shapes in every round, of other tokens: run, captured, and then replayed."""
    for turn in range(count):
        prompts = [prompt(length, 10 * turn + i) for i, length in enumerate(LENGTHS)]
        drawn = {"temperature": 0.9, "seed": turn, "top_p": 0.9}
        joins = [join(i, ids, **(drawn if i == 1 else {})) for i, ids in enumerate(prompts)]
        pair.step([(0, 0, 70, 1)], joins[:1])
        pair.step([(0, 70, 1, 1)])
        pair.step([(1, 0, 5, 1), (0, 71, 1, 1), (3, 0, 100, 0)], [joins[1], joins[3]])
        pair.step([(3, 100, 50, 1), (0, 72, 1, 1), (1, 5, 1, 1), (2, 0, 33, 1)], [joins[2]])
        for i in range(4):  # the same rows again and again: steady
            pair.step([(0, 73 + i, 1, 1), (1, 6 + i, 1, 1), (2, 33 + i, 1, 1), (3, 150 + i, 1, 1)])
        pair.step([(0, 77, 1, 1), (4, 0, 17, 1), (2, 37, 1, 1)], [joins[4]])
        pair.step([(2, 38, 1, 1), (4, 17, 1, 1)])


@pytest.mark.parametrize("name", MODELS)
def test_float32_draws_what_the_cpu_draws(name: str) -> None:
    pair = pair_of(MODELS[name])
    rounds(pair)
    assert len(pair.gpu.graphs) >= 5


@pytest.mark.parametrize(
    "way",
    [{"eager": True}, {"attention": "sdpa"}, {"deterministic": True}],
    ids=["eager", "sdpa", "deterministic"],
)
def test_float32_in_other_ways(way: dict) -> None:
    pair = pair_of(MODELS["gemma3-256"], dataclasses.replace(SETTING, **way))
    rounds(pair)
    if way.get("eager"):
        assert not len(pair.gpu.graphs)


# What rounding does to these models on a CPU, more than twice over: by how much float32 may prefer
# another token, and the cosine of the angle between distributions.
MOST_REGRET = {"bfloat16": 0.5, "float16": 0.05}
LEAST_COSINE = {"bfloat16": 0.9995, "float16": 0.9999}
HALVES = [
    ("llama-64", "bfloat16"),
    ("llama-64", "float16"),
    ("qwen2-80", "bfloat16"),
    ("qwen3-96", "float16"),
    ("qwen3-128", "bfloat16"),
    ("gemma3-256", "bfloat16"),
    ("gemma3-256", "float16"),
]


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_half_precision_is_near_float32(name: str, dtype: str) -> None:
    """Greedy tokens are ones that float32 would hardly do without, at any length and company."""
    setting = dataclasses.replace(SETTING, dtype=dtype)
    resolved = runner_pairs.resolved_for(MODELS[name], setting)
    weights, groups = RandomWeights(resolved.spec), len(resolved.kv_groups)
    gpu = runner_pairs.assembled(resolved, weights, setting).runner
    cpu = runner_pairs.cpu_runner(resolved, weights, setting.num_blocks, 6)
    tables, steps = Tables(groups), 30
    prompts = [prompt(length, i) for i, length in enumerate(LENGTHS)]
    answers: list[list[int]] = [[] for _ in prompts]
    for slot, each in enumerate(prompts):  # one prompt a step, beside those that decode
        rows = [(i, len(prompts[i]) + len(answers[i]) - 1, 1, 1) for i in range(slot)]
        message = tables.message([*rows, (slot, 0, len(each), 1)], [join(slot, each)])
        for answer, token in zip(answers, tokens_of(gpu.execute(message)), strict=False):
            answer.append(token)
    for _ in range(steps):
        rows = [(i, len(prompts[i]) + len(answers[i]) - 1, 1, 1) for i in range(len(prompts))]
        result = gpu.execute(tables.message(rows))
        for answer, token in zip(answers, tokens_of(result), strict=True):
            answer.append(token)
    assert len(gpu.graphs) >= 1
    regrets = [
        regret
        for each, answer in zip(prompts, answers, strict=True)
        for regret in runner_pairs.regrets(cpu, each, answer, groups)
    ]
    assert max(regrets) < MOST_REGRET[dtype]
    assert sum(regrets) / len(regrets) < MOST_REGRET[dtype] / 25


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_distributions_in_half_precision(name: str, dtype: str) -> None:
    """All log-probabilities of steps whose tokens are prescribed, prefilled and decoded."""
    spec, setting = MODELS[name], dataclasses.replace(SETTING, dtype=dtype)
    resolved = runner_pairs.resolved_for(spec, setting)
    weights = RandomWeights(spec)
    gpu = runner_pairs.assembled(resolved, weights, setting).runner
    cpu = runner_pairs.cpu_runner(resolved, weights, setting.num_blocks, 6)
    tables = Tables(len(resolved.kv_groups))
    joins = [
        join(i, prompt(n, i), allowed_ids=ids([7 + i]), logprobs=VOCAB)
        for i, n in enumerate(LENGTHS[:3])
    ]
    messages = [tables.message([(i, 0, n, 1) for i, n in enumerate(LENGTHS[:3])], joins)]
    for step in range(5):
        rows = [(i, n + step, 1, 1) for i, n in enumerate(LENGTHS[:3])]
        messages.append(tables.message(rows))
    for message in messages:
        got, wanted = gpu.execute(message), cpu.execute(message)
        assert tokens_of(got) == tokens_of(wanted) == [7, 8, 9]
        mine, theirs = centred(got.logprobs), centred(wanted.logprobs)
        assert torch.cosine_similarity(mine, theirs, dim=-1).min() > LEAST_COSINE[dtype]


def centred(columns: object) -> torch.Tensor:
    """Return logits of all ids, less their mean: [rows, V]."""
    entries = entries_of(columns)
    logits = torch.zeros(len(entries), VOCAB)
    for row, (_, _, candidates, values) in enumerate(entries):
        logits[row, torch.tensor(candidates)] = torch.tensor(values)
    return logits - logits.mean(-1, keepdim=True)


# ------------------------------------------------------------------------------- run ahead, forks


def test_steps_are_launched_ahead() -> None:
    """Many steps in flight, a join among them: each reads what the one before has drawn."""
    spec = MODELS["llama-64"]
    pair, expected = pair_of(spec), []
    first, second = join(0, prompt(70, 1)), join(1, prompt(33, 2), temperature=1.0, seed=3)
    steps = [([(0, 0, 70, 1)], [first])]
    steps += [([(0, 70 + i, 1, 1)], []) for i in range(5)]
    steps += [([(0, 75, 1, 1), (1, 0, 33, 1)], [second])]
    steps += [([(0, 76 + i, 1, 1), (1, 33 + i, 1, 1)], []) for i in range(6)]
    for rows, joins in steps:
        expected.append(pair.step(rows, joins))
    gpu = pair_of(spec).gpu
    tables = Tables(pair.num_groups)
    for rows, joins in steps:
        gpu.launch(tables.message(rows, joins))
    assert [tokens_of(gpu.collect()) for _ in steps] == expected and not gpu.in_flight


def test_every_kind_of_sampling_in_one_batch() -> None:
    pair = pair_of(MODELS["gemma3-256"])
    mixed = [
        join(0, prompt(40, 0), temperature=1.0, seed=1, top_p=0.7),
        join(1, prompt(8, 1), temperature=1.2, seed=2, top_k=5, repetition_penalty=1.3),
        join(2, prompt(6, 2), logprobs=3, bias_ids=ids([7, 8]), bias_values=floats([4, -4])),
        join(3, prompt(9, 3), prompt_logprobs=2, frequency_penalty=0.5, temperature=0.7, seed=9),
        join(4, prompt(7, 4), allowed_ids=ids([1, 2, 3]), temperature=1.5, seed=3, logprobs=0),
    ]
    rows = [(j.slot, 0, j.num_prompt_tokens, 1) for j in mixed]
    pair.step(rows, mixed)
    for step in range(6):
        pair.step([(slot, length + step, 1, 1) for slot, _, length, _ in rows])


def test_a_fork_continues_in_copied_blocks() -> None:
    pair = pair_of(MODELS["gemma3-256"])
    tokens = prompt(20, 5)
    first = pair.step([(0, 0, 20, 1)], [join(0, tokens, temperature=1.0, seed=4)])
    pair.held[1], pair.next_block = 0, 11
    copies = [(group, block, block + 10) for group in range(2) for block in (1, 2)]
    fork = join(1, tokens, temperature=1.0, seed=4)
    again = pair.step([(1, 19, 1, 1), (0, 20, 1, 1)], [fork], copies)
    assert again[0] == first[0]
    for step in range(3):
        pair.step([(1, 20 + step, 1, 1), (0, 21 + step, 1, 1)])


# ------------------------------------------------------------------------------- as a server starts


class OnHost:
    """The random weights that a GPU worker makes, for the CPU's runner."""

    def __init__(self, spec: ModelSpec) -> None:
        made = DummyWeights(spec, 0, CUDA)
        self._tensors = {name: made.get(name).cpu() for name in made.names()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()


@pytest.mark.parametrize(
    ("name", "max_num_seqs", "way"),
    [
        ("llama-64", 1, {}),
        ("gemma3-256", 5, {}),
        ("gemma3-256", 5, {"attention": "sdpa"}),
        ("llama-64", 256, {}),
        ("gemma3-256", 256, {"eager": True}),
    ],
)
def test_servers_of_every_size(
    name: str, max_num_seqs: int, way: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started as a worker does; then random traffic, within the memory that was planned."""
    setting = dataclasses.replace(
        SETTING, max_num_seqs=max_num_seqs, max_num_batched_tokens=512, **way
    )
    cache = CacheOptions(kv_cache_memory_bytes=KV_BYTES)
    resolved = runner_pairs.resolved_for(MODELS[name], setting, cache=cache)
    weights = OnHost(resolved.spec)
    plans: list[gpu_memory.GpuPlan] = []
    verify = gpu_memory.verify

    def noted(plan: gpu_memory.GpuPlan, measured: gpu_memory.Measured) -> list[str]:
        plans.append(plan)
        return verify(plan, measured)

    monkeypatch.setattr(gpu_memory, "verify", noted)
    started = gpu_startup.start(resolved, 0, lambda phase: None)
    while started.runner.use_idle_time():
        pass
    totals = started.ready.num_blocks
    cpu = runner_pairs.cpu_runner(resolved, weights, max(totals), max_num_seqs)
    pair = Pair(started.runner, cpu, len(resolved.kv_groups))
    longest = 80 if max_num_seqs > 5 else 12
    traffic = Traffic(VOCAB, max_num_seqs, budget=512, longest=longest, seed=max_num_seqs)
    for rows, joins in traffic.steps(40):
        traffic.drew(rows, pair.step(rows, joins))
    assert traffic.finished >= max(2, max_num_seqs // 4)
    assert pair.next_block < min(totals), "the test took more blocks than there are"
    (plan,) = plans
    assert verify(plan, gpu_measure.measured(CUDA))  # raises if more was taken
