"""The GPU's runner in Triton's interpreter, against the CPU's on the same model and messages."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import triton_interpreter
from tiny_models import LLAMA
from worker_steps import execute, floats, ids, join, tokens_of

triton_interpreter.enable()

import runner_pairs  # noqa: E402
from runner_pairs import Setting  # noqa: E402

from zlm.config import ModelSpec, Resolved  # noqa: E402
from zlm.ops.gpu import GpuOps  # noqa: E402
from zlm.worker import gpu_forecast, gpu_startup, gpu_steps  # noqa: E402
from zlm.worker.dummy_weights import DummyWeights  # noqa: E402
from zlm.worker.gpu_startup import Assembled  # noqa: E402
from zlm.worker.gpu_steps import StepShape  # noqa: E402

# Padding is computed from memory that nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BLOCKS = 40
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69, 39]


@pytest.fixture(autouse=True)
def cheap_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller buckets, hence less padding: each program takes the interpreter milliseconds."""
    triton_interpreter.wide_programs(monkeypatch)
    monkeypatch.setattr(gpu_steps, "MIXED_DECODES", (0, 4, 8))
    monkeypatch.setattr(gpu_steps, "FEW", 4)
    monkeypatch.setattr(gpu_steps, "_prefill_bucket", lambda tokens: -(-tokens // 16) * 16)


def spec(windows: tuple[int, ...]) -> ModelSpec:
    return msgspec.structs.replace(
        LLAMA,
        vocab_size=97,
        num_layers=max(1, len(windows)),
        max_position=96,
        tie_embeddings=True,
        layer_windows=windows,
    )


class Pair(runner_pairs.Pair):
    """Both runners of a model in the interpreter."""

    def __init__(self, windows: tuple[int, ...] = (), **fields: Any) -> None:
        setting = Setting(num_blocks=BLOCKS, **fields)
        self.resolved: Resolved = runner_pairs.resolved_for(spec(windows), setting)
        weights = DummyWeights(self.resolved.spec, 0)
        self.assembled: Assembled = runner_pairs.assembled(self.resolved, weights, setting)
        cpu = runner_pairs.cpu_runner(self.resolved, weights, BLOCKS, setting.max_num_seqs)
        super().__init__(self.assembled.runner, cpu, len(self.resolved.kv_groups))


@pytest.mark.parametrize("windows", [(), (0, 7)], ids=["full", "full-sliding"])
def test_prefill_decodes_and_both_at_once(windows: tuple[int, ...]) -> None:
    pair = Pair(windows)
    pair.step([(4, 0, 23, 1)], [join(4, PROMPT)])
    pair.step([(4, 23, 1, 1)])
    pair.step(
        [(2, 0, 9, 0), (4, 24, 1, 1), (0, 0, 5, 1)],
        [join(2, PROMPT[:20]), join(0, PROMPT[:5], temperature=0.8, seed=5)],
    )
    pair.step([(4, 25, 1, 1), (2, 9, 11, 1), (0, 5, 1, 1)])
    for step in range(3):
        pair.step([(0, 6 + step, 1, 1), (2, 20 + step, 1, 1), (4, 26 + step, 1, 1)])


def test_a_row_that_does_not_sample_among_decodes() -> None:
    """A chunk of one token, not the prompt's last: its place is a dummy's."""
    pair = Pair()
    pair.step([(1, 0, 4, 0), (3, 0, 6, 1)], [join(1, PROMPT[:6]), join(3, PROMPT[:6])])
    assert len(pair.step([(3, 6, 1, 1), (1, 4, 1, 0)])) == 1
    assert len(pair.step([(3, 7, 1, 1), (1, 5, 1, 1)])) == 2
    assert pair.step([(1, 6, 1, 0)]) == []


def test_the_last_layer_computes_sampled_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' attention ends with the layer before; all of them if the prompt is reported."""
    pair = Pair((0, 0))
    layers, computed = pair.gpu._program._model.layers, []  # type: ignore[attr-defined]
    for number, layer in enumerate(layers):

        def add(x: Any, *others: Any, number: int = number, add: Any = layer.mlp.add) -> Any:
            computed.append((number, len(x)))
            return add(x, *others)

        monkeypatch.setattr(layer.mlp, "add", add)
    samples = gpu_steps.FEW
    pair.step([(0, 0, 23, 1)], [join(0, PROMPT)])
    assert computed == [(0, 32), (1, samples)]
    computed.clear()
    pair.step([(0, 23, 1, 1), (1, 0, 9, 0)], [join(1, PROMPT)])
    assert computed == [(0, 4 + 16), (1, 4 + samples)]
    computed.clear()
    pair.step([(2, 0, 9, 0)], [join(2, PROMPT)])
    assert computed == [(0, 16), (1, 1)]
    computed.clear()
    pair.step([(3, 0, 9, 0)], [join(3, PROMPT, prompt_logprobs=1)])
    assert computed == [(0, 16), (1, 16)]


def test_once_its_prompt_is_reported_a_sequence_is_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only steps with prompt tokens to report need hidden states, which a graph does not give."""
    pair = Pair()
    graphs = FakeGraphs(pair.gpu.graphs.run)
    monkeypatch.setattr(pair.gpu, "graphs", graphs)
    pair.step([(0, 0, 9, 0)], [join(0, PROMPT, prompt_logprobs=2)])
    pair.step([(0, 9, 13, 0)])
    assert not graphs.ran
    pair.step([(0, 22, 1, 1)])
    pair.step([(0, 23, 1, 1)])
    assert graphs.ran == [pair.assembled.sizes.decodes(1)] * 2


def test_masks_of_grammars_beside_every_kind_of_sampling() -> None:
    """Two of five rows are masked, in prefill and in steady decode: greedy, drawn, reported."""
    pair = Pair()
    kinds = [
        {},
        {"temperature": 0.9, "seed": 4, "top_k": 8},
        {"logprobs": 2, "allowed_ids": ids(range(0, 97, 2))},
        {"temperature": 1.0, "seed": 6, "presence_penalty": 1.0, "logprobs": 1},
        {"temperature": 1.1, "seed": 7},
    ]
    joins = [join(slot, PROMPT[slot:], **kind) for slot, kind in enumerate(kinds)]
    lengths = [len(PROMPT) - slot for slot in range(5)]
    allowed = [5, 6, 40, 96]
    rows = [(slot, 0, lengths[slot], 1) for slot in range(5)]
    first = pair.step(rows, joins, masks={1: allowed, 2: allowed})
    assert first[1] in allowed and first[2] in (6, 40, 96)
    for more in range(3):
        rows = [(slot, lengths[slot] + more, 1, 1) for slot in range(5)]
        got = pair.step(rows, masks={0: [more], 3: allowed})
        assert got[0] == more and got[3] in allowed
    rows = [(slot, lengths[slot] + 3, 1, 1) for slot in range(5)]
    pair.step(rows, masks={})  # those that had a grammar are over
    rows = [(slot, lengths[slot] + 4, 1, 1) for slot in range(5)]
    pair.step(rows)
    rows = [(slot, lengths[slot] + 5, 1, 1) for slot in range(5)]
    assert pair.step(rows, masks={2: [1, 3]})[2] == 0  # the lists of the request allow neither


def test_every_kind_of_sampling_in_one_batch() -> None:
    pair = Pair()
    mixed = [
        join(0, PROMPT, temperature=1.0, seed=1, top_p=0.7),
        join(1, PROMPT[:8], temperature=1.2, seed=2, top_k=5, repetition_penalty=1.3),
        join(2, PROMPT[3:9], logprobs=3, bias_ids=ids([7, 8]), bias_values=floats([4, -4])),
        join(3, PROMPT[5:9], prompt_logprobs=2, frequency_penalty=0.5, temperature=0.7, seed=9),
        join(4, PROMPT[1:7], allowed_ids=ids([1, 2, 3]), temperature=1.5, seed=3, logprobs=0),
    ]
    rows = [(j.slot, 0, j.num_prompt_tokens, 1) for j in mixed]
    pair.step(rows, mixed)
    for step in range(2):
        pair.step([(slot, length + step, 1, 1) for slot, _, length, _ in rows])
    pair.step([(0, 25, 1, 1), (5, 0, 9, 1)], [join(5, PROMPT[:9])])
    pair.step([(0, 26, 1, 1), (5, 9, 1, 1)])


def test_slots_are_reused_and_blocks_copied() -> None:
    pair = Pair((0, 7))
    first = pair.step([(0, 0, 20, 1)], [join(0, PROMPT[:20], temperature=1.0, seed=4)])
    fork = join(1, PROMPT[:20], temperature=1.0, seed=4)
    copies = [(group, block, block + 10) for group in range(2) for block in (1, 2)]
    pair.held[1] = 0
    pair.next_block = 11
    again = pair.step([(1, 19, 1, 1), (0, 20, 1, 1)], [fork], copies)
    assert again[0] == first[0]
    pair.step([(0, 0, 3, 1)], [join(0, PROMPT[20:])])
    pair.step([(0, 3, 1, 1)])


def test_steps_are_launched_ahead() -> None:
    """A decode reads the token that the step before it has put into the table."""
    pair = Pair()
    expected = pair.step([(0, 0, 6, 1)], [join(0, PROMPT[:6])])
    for step in range(3):
        expected += pair.step([(0, 6 + step, 1, 1)])
    gpu = Pair().gpu
    entries = [(0, 0, 0, 1)]
    gpu.launch(execute(1, [(0, 0, 6, 1)], [join(0, PROMPT[:6])], entries))
    for step in range(3):
        gpu.launch(execute(2 + step, [(0, 6 + step, 1, 1)]))
    results = []
    while gpu.in_flight:
        assert gpu.done()
        results.append(gpu.collect())
    assert [r.step for r in results] == [1, 2, 3, 4]
    assert [token for r in results for token in tokens_of(r)] == expected


def test_the_attention_for_old_cards() -> None:
    pair = Pair((0, 7), attention="sdpa")
    pair.step([(4, 0, 23, 1)], [join(4, PROMPT)])
    pair.step([(2, 0, 9, 1), (4, 23, 1, 1)], [join(2, PROMPT[:9])])
    pair.step([(2, 9, 1, 1), (4, 24, 1, 1)])


def test_warm_up_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_startup, "WARM_LOGITS", 2)
    monkeypatch.setattr(gpu_startup, "WARM_PREFILLS", (16,))
    pair = Pair((0, 7), max_num_batched_tokens=32)
    gpu_startup.warm_up(pair.assembled, pair.resolved, [BLOCKS - 1] * 2)
    assert not pair.gpu.in_flight
    assert not pair.assembled.tables.blocks.any() and not pair.assembled.tables.tokens.any()
    pair.step([(4, 0, 23, 1)], [join(4, PROMPT)])
    pair.step([(4, 23, 1, 1)])


class FakeGraphs:
    """Remembers what was captured, and runs steps without."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.captured: list[tuple] = []
        self.ran: list[StepShape] = []

    def run(self, shape: StepShape, form: str) -> None:
        self.ran.append(shape)
        self._run(shape, form)

    def takes(self, *key: Any) -> bool:
        return key not in self.captured

    def nearest(self, shape: StepShape, form: str, most_padding: int) -> StepShape | None:
        known = [captured for captured, its_form in self.captured if its_form == form]
        return next((each for each in known if each.holds(shape)), None)

    def capture(self, *key: Any) -> None:
        self.captured.append(key)


def test_idle_time_captures_steps_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run between a sequence's steps, which go on as if nothing had been."""
    pair = Pair((0, 7))
    graphs = FakeGraphs(pair.gpu.graphs.run)
    monkeypatch.setattr(pair.gpu, "graphs", graphs)
    sizes = pair.assembled.sizes
    shapes = [sizes.mixed(4, 1, 16, 5), sizes.mixed(4, 1, 16, 5), sizes.decodes(2)]
    pair.gpu.spare_shapes.extend((shape, "draw") for shape in shapes)
    pair.step([(4, 0, 23, 1)], [join(4, PROMPT)])
    pair.step([(4, 23, 1, 1)])
    assert pair.gpu.use_idle_time()
    pair.step([(4, 24, 1, 1)])
    assert not pair.gpu.use_idle_time() and not pair.gpu.use_idle_time()
    assert graphs.captured == [(shapes[0], "draw"), (shapes[2], "draw")]
    pair.step([(4, 25, 1, 1)])


def test_prompts_run_in_the_graph_of_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """More decodes, tokens and rows than there are: padding, and the answers are the same."""
    pair = Pair((0, 7))
    graphs = FakeGraphs(pair.gpu.graphs.run)
    monkeypatch.setattr(pair.gpu, "graphs", graphs)
    longer = pair.assembled.sizes.mixed(4, 1, 64, 5)
    graphs.captured.append((longer, "draw"))
    pair.step([(4, 0, 23, 1)], [join(4, PROMPT)])
    pair.gpu.most_padding = 200
    pair.step(
        [(4, 23, 1, 1), (2, 0, 9, 1), (3, 0, 7, 1)], [join(2, PROMPT[:9]), join(3, PROMPT[:7])]
    )
    pair.step([(2, 9, 1, 1), (3, 7, 1, 1), (4, 24, 1, 1)])
    assert graphs.ran[0].prefill_tokens < longer.prefill_tokens and graphs.ran[1] == longer


def test_only_decodes_of_the_attention_for_old_cards_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its steps with prompts need lengths on the host, which a graph would keep for ever."""
    pair = Pair(attention="sdpa")
    graphs = FakeGraphs(pair.gpu.graphs.run)
    monkeypatch.setattr(pair.gpu, "graphs", graphs)
    sizes = pair.assembled.sizes
    spare = [sizes.mixed(4, 1, 16, 5), sizes.decodes(2)]
    pair.gpu.spare_shapes.extend((shape, "draw") for shape in spare)
    assert not pair.gpu.use_idle_time()
    assert graphs.captured == [(sizes.decodes(2), "draw")]
    pair.step([(4, 0, 9, 1)], [join(4, PROMPT[:9])])
    pair.step([(2, 0, 9, 1), (4, 9, 1, 1)], [join(2, PROMPT[:9])])
    assert not graphs.ran
    pair.step([(2, 9, 1, 1), (4, 10, 1, 1)])
    pair.step([(2, 10, 1, 1), (4, 11, 1, 1)])
    assert graphs.ran == [sizes.decodes(2)] * 2


def test_steps_that_the_card_computes_for_long_are_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    graphs = FakeGraphs(pair.gpu.graphs.run)
    monkeypatch.setattr(pair.gpu, "graphs", graphs)
    monkeypatch.setattr(pair.gpu, "_captured_tokens", 16)
    sizes = pair.assembled.sizes
    large, small = sizes.mixed(4, 1, 65, 5), replace(sizes.mixed(4, 1, 64, 5), prefill_tokens=16)
    pair.gpu.spare_shapes.extend([(large, "draw"), (small, "draw")])
    assert not pair.gpu.use_idle_time()
    assert graphs.captured == [(small, "draw")]
    pair.step([(4, 0, 23, 1)], [join(4, PROMPT)])
    assert not graphs.ran
    pair.step([(4, 23, 1, 1)])
    assert graphs.ran == [sizes.decodes(1)]


def test_small_models_capture_all_steps_and_large_ones_short_prompts() -> None:
    resolved = runner_pairs.resolved_for(spec(()), Setting(max_num_batched_tokens=8192))
    sizes = gpu_steps.StepSizes(6)
    whole = sizes.largest(8192)
    assert gpu_forecast.largest_captured(resolved, sizes) == whole
    large = msgspec.structs.replace(
        resolved.spec, hidden_size=4096, intermediate_size=14336, num_layers=32, vocab_size=128256
    )
    shape = gpu_forecast.largest_captured(msgspec.structs.replace(resolved, spec=large), sizes)
    assert 1024 <= shape.prefill_tokens <= 2048
    assert (shape.decodes, shape.samples) == (whole.decodes, whole.samples)


@pytest.mark.parametrize(("attention", "tokens"), [("triton", 72), ("sdpa", 6)])
def test_memory_is_planned_for_what_is_captured(attention: str, tokens: int) -> None:
    resolved = runner_pairs.resolved_for(spec(()), Setting(max_num_batched_tokens=64))
    ops = GpuOps(torch.device("cpu"), torch.float32, attention=attention)
    limits = gpu_forecast.capacities(
        resolved, gpu_steps.StepSizes(6), prefill_graphs=not ops.needs_lengths
    )
    assert limits.tokens == 72 and limits.graph_tokens == tokens
