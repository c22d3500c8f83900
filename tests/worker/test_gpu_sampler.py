"""Sampling through the kernels, in Triton's interpreter, against the CPU sampler."""

import math

import numpy as np
import pytest
import torch
import triton_interpreter
from worker_steps import floats, ids, join

triton_interpreter.enable()

from sampler_pairs import SLOTS, VOCAB, WIDTH, Both, logits_of, mixture  # noqa: E402
from zlm.kernels import sampling, sampling_columns, sampling_cut, sampling_logprobs  # noqa: E402

from zlm.messages import ROW_ALL_MASKED, ROW_NAN, ROW_OK  # noqa: E402
from zlm.worker import gpu_costs  # noqa: E402
from zlm.worker.gpu_sampler_warm import warm  # noqa: E402

CHUNK = 128  # smaller than the kernels' own, so that the interpreter is quick: VOCAB has two


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling, sampling_columns, sampling_cut, sampling_logprobs):
        monkeypatch.setattr(module, "CHUNK", CHUNK)


# ------------------------------------------------------------------------------ equality


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("seed", range(3))
def test_mixtures_sample_as_on_the_cpu(seed: int) -> None:
    """Two steps, so that penalties count what was drawn; then half of the slots change hands."""
    random = np.random.default_rng(seed)
    both = Both()
    slots = random.permutation(SLOTS)[:12]
    both.join(*(mixture(random, int(slot), VOCAB) for slot in slots))
    for padding in (0, 5):
        both.step(logits_of(random, 12), slots, padding)
    both.join(*(mixture(random, int(slot), VOCAB) for slot in slots[::2]))
    both.step(logits_of(random, 12), random.permutation(slots))


def test_a_vocabulary_of_several_chunks() -> None:
    random = np.random.default_rng(7)
    both, vocab = Both(4500), 4500
    slots = np.array([3, 9, 0, 6])
    both.join(*(mixture(random, int(slot), vocab) for slot in slots))
    both.join(join(12, [4, 4], 1, temperature=0.9, top_p=0.9, top_k=50, logprobs=3))
    both.join(join(2, [5, 4499], 1, repetition_penalty=4.0, allowed_ids=ids([31, 4098, 4499])))
    slots = np.append(slots, [12, 2])
    for _ in range(2):
        both.step(logits_of(random, 6, vocab), slots)


@pytest.mark.usefixtures("small_chunks")
def test_penalties_follow_what_is_drawn() -> None:
    """Greedy over the same logits: every token is penalised once it was drawn."""
    both = Both()
    penalty = {"frequency_penalty": 40.0}
    both.join(join(4, [1], **penalty), join(5, [1]), join(6, [1], repetition_penalty=1e6))
    slots = np.array([4, 5, 6])
    logits = logits_of(np.random.default_rng(3), 1).abs().expand(3, -1)
    drawn = [both.step(logits, slots)[0] for _ in range(4)]
    punished, plain, repeated = zip(*drawn, strict=True)
    assert len(set(punished)) == len(set(repeated)) == 4 and len(set(plain)) == 1


# ------------------------------------------------------------------------------ slots


@pytest.mark.usefixtures("small_chunks")
def test_variants() -> None:
    both = Both()
    cases = [
        ({}, "draw"), ({"temperature": 0.8}, "draw"), ({"temperature": 0.8, "top_k": 3}, "cut"),
        ({"temperature": 0.8, "top_p": 0.9}, "cut"), ({"temperature": 0.8, "min_p": 0.1}, "cut"),
        ({"temperature": 0.0, "top_p": 0.9}, "draw"), ({"temperature": 1.0, "top_k": 1}, "draw"),
        ({"temperature": 1.0, "top_k": VOCAB}, "draw"), ({"repetition_penalty": 1.1}, None),
        ({"presence_penalty": 1.1}, None), ({"frequency_penalty": 1.1}, None),
        ({"logprobs": 0}, None), ({"bad_words": [ids([3])]}, None),
        ({"bias_ids": ids([3]), "bias_values": floats([1])}, None),
        ({"allowed_ids": ids([3])}, None), ({"min_tokens": 3, "banned_until_min": ids([3])}, None),
    ]  # fmt: skip
    for spec, wanted in cases:
        both.join(join(1, [7], **spec))
        assert both.gpu.variant(np.array([1])) == wanted, spec
    both.join(join(2, [7]), join(3, [7], temperature=1.0, top_p=0.5))
    assert both.gpu.variant(np.array([2, 3])) == "cut"
    assert both.gpu.variant(np.array([2, 1, 3])) is None
    assert both.gpu.variant(np.array([2])) == "draw"


@pytest.mark.usefixtures("small_chunks")
def test_a_rejoined_slot_forgets_its_past() -> None:
    both, random = Both(), np.random.default_rng(1)
    best = {"bias_ids": ids([9]), "bias_values": floats([90])}
    both.join(
        join(1, [2, 9], 1, frequency_penalty=60.0, **best), join(2, [3], allowed_ids=ids([8]))
    )
    slots = np.array([1, 2])
    first, _ = both.step(logits_of(random, 2), slots)
    assert first == [9, 8]  # 90 - 60 is more than any logit
    second, _ = both.step(logits_of(random, 2), slots)
    assert second[0] != 9  # counted twice
    both.join(join(1, [2], frequency_penalty=60.0, **best), join(2, [3], seed=5, temperature=1.0))
    assert both.step(logits_of(random, 2), slots)[0][0] == 9
    both.join(join(1, [2]), join(2, [3], allowed_ids=ids([11])))
    logits = logits_of(random, 2)
    assert both.step(logits, slots)[0] == [int(logits[0].argmax()), 11]
    both.join(join(2, [3]))
    assert both.gpu.variant(slots) == "draw"
    logits = logits_of(random, 2)
    assert both.step(logits, slots)[0] == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("small_chunks")
def test_a_resumed_sequence_is_counted_anew() -> None:
    """What a preempted sequence drew before it left is in its tokens, and counts once."""
    random = np.random.default_rng(2)
    spec = {"presence_penalty": 1.0, "frequency_penalty": 0.7, "temperature": 0.5, "seed": 3}
    both, steps = Both(), [logits_of(random, 1) for _ in range(5)]
    both.join(join(0, [1, 2, 3], 2, **spec))
    straight = [both.step(logits, np.array([0]))[0][0] for logits in steps]
    other = Both()
    other.join(join(6, [1, 2, 3], 2, **spec))
    for logits in [*steps[:2], steps[4]]:  # the last one ran ahead of the preemption
        other.step(logits, np.array([6]))
    other.join(join(3, [1, 2, 3, *straight[:2]], 2, **spec), join(6, [5], **spec))
    resumed = [other.step(logits, np.array([3]))[0][0] for logits in steps[2:]]
    assert resumed == straight[2:]


# ------------------------------------------------------------------------------ edges


@pytest.mark.usefixtures("small_chunks")
def test_broken_rows_are_reported() -> None:
    """In every variant; a NaN is reported even if it is masked away, and neighbours go on."""
    both, random = Both(), np.random.default_rng(4)
    masked = {"allowed_ids": ids([3]), "bad_words": [ids([3])]}
    sets = [
        [{}, {"temperature": 0.7}, {}],
        [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5}],
        [{"logprobs": 2}, {"allowed_ids": ids([3, 4])}, {"presence_penalty": 1.0}],
    ]
    for specs in sets:
        both.join(*(join(slot, [1], **spec) for slot, spec in enumerate([*specs, {}])))
        slots = np.arange(4)
        for broken in (math.nan, math.inf):
            logits = logits_of(random, 4)
            logits[:3, 9] = broken
            allowed = "allowed_ids" in specs[1] and broken == math.inf
            wanted = [ROW_NAN, ROW_OK if allowed else ROW_NAN, ROW_NAN, ROW_OK]
            assert both.step(logits, slots)[1] == wanted
        logits[:3] = -math.inf
        assert both.step(logits, slots)[1] == [ROW_ALL_MASKED] * 3 + [ROW_OK]
    both.join(join(0, [1], **masked), join(1, [1], temperature=1.0))
    assert both.step(logits_of(random, 2), np.array([0, 1]))[1] == [ROW_ALL_MASKED, ROW_OK]


@pytest.mark.usefixtures("small_chunks")
def test_a_full_context_takes_no_token_out_of_bounds() -> None:
    both, random = Both(), np.random.default_rng(5)
    both.join(join(2, [1]), join(3, [1], logprobs=1))
    both.lengths[[2, 3]] = WIDTH
    before = both.gpu_tokens.clone()
    for slots in (np.array([2]), np.array([3, 2])):
        logits = logits_of(random, len(slots))
        tokens, status, _ = both.by_gpu(logits.clone(), slots)
        assert tokens.tolist() == logits.argmax(-1).tolist() and not status.any()
    assert torch.equal(both.gpu_tokens, before)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("most", [0, 1, 7, 32, 33, VOCAB + 5])
def test_logprobs_are_of_the_raw_logits(most: int) -> None:
    """More alternatives than the kernels keep, and more than there are tokens, too."""
    both, random = Both(), np.random.default_rng(most)
    changed = {"bias_ids": ids([4]), "bias_values": floats([99.0]), "logprobs": most}
    both.join(join(1, [6, 4], 1, repetition_penalty=3.0, **changed))
    both.join(join(2, [1], logprobs=2), join(3, [1]), join(4, [1], logprobs=0, min_tokens=1))
    logits = logits_of(random, 4)
    logits[3, 30:] = -math.inf
    assert both.step(logits, np.array([3, 1, 2, 4]), padding=2)[0][1] == 4
    twice = logits_of(random, 4)
    twice[0] = math.nan
    both.step(twice, np.array([1, 3, 4, 2]))


@pytest.mark.usefixtures("small_chunks")
def test_logits_are_left_alone_if_rows_report() -> None:
    both, logits = Both(), logits_of(np.random.default_rng(6), 2)
    both.join(join(1, [6, 4], 1, repetition_penalty=3.0), join(2, [1], logprobs=2))
    slots, kept = np.array([1, 2]), logits.clone()
    places = torch.tensor([1, 2], dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    both.gpu.full(
        logits, places, places, slots, tokens_out=out, status_out=torch.zeros(2, dtype=torch.uint8)
    )
    assert torch.equal(logits, kept)


@pytest.mark.usefixtures("small_chunks")
def test_ids_outside_the_vocabulary_are_dropped() -> None:
    both, random = Both(), np.random.default_rng(9)
    outside = [VOCAB, -1, 2**31 - 1]
    both.join(
        join(1, [1], allowed_ids=ids([*outside, 5, 6]), bad_words=[ids([VOCAB]), ids([6, -1])]),
        join(2, [1], bias_ids=ids([*outside, 2]), bias_values=floats([99, 99, 99, 50])),
        join(3, [1], min_tokens=5, banned_until_min=ids(outside)),
    )
    tokens, _ = both.step(logits_of(random, 3), np.array([1, 2, 3]))
    assert tokens[0] in (5, 6) and tokens[1] == 2


@pytest.mark.usefixtures("small_chunks")
def test_warming_leaves_no_trace_but_the_tokens() -> None:
    both, random = Both(), np.random.default_rng(10)
    warm(both.gpu, logits_of(random, 3))
    assert both.gpu.variant(np.array([0])) == "draw"
    both.gpu_tokens.zero_()
    both.join(*(mixture(random, slot, VOCAB) for slot in range(6)))
    for _ in range(2):
        both.step(logits_of(random, 6), np.arange(6))


def test_the_memory_plan_covers_what_is_kept() -> None:
    """Everything that a sampler ever allocates to keep, beside the runner's token table."""
    both = Both(5000)
    warm(both.gpu, logits_of(np.random.default_rng(0), 2, 5000))
    kept = sum({t.data_ptr(): t.nbytes for t in tensors_of(both.gpu)}.values())
    kept -= both.gpu_tokens.nbytes
    assert kept > (SLOTS + 1) * 5000 * 4, "the counts alone"
    rows = 32  # 20 samples, rounded up
    assert kept < gpu_costs.sampler_bytes(5000, SLOTS + 1, rows) < 2 * kept


def tensors_of(owner: object) -> list[torch.Tensor]:
    """Return the tensors in an object's fields, and in those of zlm's objects there."""
    if isinstance(owner, torch.Tensor):
        return [owner]
    if isinstance(owner, dict):
        return [t for value in owner.values() for t in tensors_of(value)]
    if not type(owner).__module__.startswith("zlm."):
        return []
    names = getattr(owner, "__slots__", None) or vars(owner)
    return [t for name in names for t in tensors_of(getattr(owner, name))]
