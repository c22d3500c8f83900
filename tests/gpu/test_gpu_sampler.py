"""Sampling on the GPU at real sizes: as on the CPU, without a wait, and inside a CUDA graph."""

import numpy as np
import pytest
import torch
from worker_steps import join


@pytest.mark.parametrize("vocab", [180, 49_152])
def test_mixtures_sample_as_on_the_cpu(vocab: int) -> None:
    from sampler_pairs import SLOTS, Both, logits_of, mixture

    random = np.random.default_rng(vocab)
    both = Both(vocab, "cuda")
    for _ in range(3):
        slots = random.permutation(SLOTS)[:12]
        both.join(*(mixture(random, int(slot), vocab) for slot in slots))
        for padding in (0, 5):
            both.step(logits_of(random, 12, vocab), slots, padding)


def test_the_host_waits_for_nothing() -> None:
    """Joins, selections, edits and reports, also wider than the kernels keep, in a warm sampler."""
    from sampler_pairs import SLOTS, Both, logits_of, mixture

    from zlm.worker.gpu_sampler_warm import warm

    random = np.random.default_rng(1)
    both = Both(5000, "cuda")
    logits = logits_of(random, SLOTS, 5000).cuda()
    warm(both.gpu, logits.clone())
    slots = np.arange(SLOTS)
    joins = [mixture(random, slot, 5000) for slot in range(SLOTS)]
    wide = join(SLOTS - 1, [1, 2], 1, logprobs=100, presence_penalty=1.0)
    device_slots = torch.arange(SLOTS, dtype=torch.int32, device="cuda")
    lengths = torch.full_like(device_slots, 9)
    out, status = torch.zeros_like(device_slots), torch.zeros(SLOTS, dtype=torch.uint8).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in (joins, [wide]):
            both.gpu.join(batch)
            report = both.launch(logits.clone(), device_slots, lengths, slots, out, status)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report is not None and not status.any()


@pytest.mark.parametrize("spec", [{}, {"top_p": 0.8, "min_p": 0.01}], ids=["draw", "cut"])
def test_a_graph_draws_what_a_launch_draws(spec: dict) -> None:
    """With parameters that joins change after the capture."""
    from sampler_pairs import SLOTS, Both, logits_of

    random, vocab = np.random.default_rng(2), 30_000
    both = Both(vocab, "cuda")
    static = torch.zeros(16, vocab, device="cuda")
    slots = torch.full((16,), SLOTS, dtype=torch.int32, device="cuda")
    lengths = torch.zeros_like(slots)
    out, status = torch.zeros_like(slots), torch.zeros(16, dtype=torch.uint8, device="cuda")
    arguments = {"tokens_out": out, "status_out": status, "cut": bool(spec)}
    both.gpu.draw(static, slots, lengths, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both.gpu.draw(static, slots, lengths, **arguments)
    for seed in range(3):
        both.join(*(join(s, [1, 2], temperature=0.8, seed=seed + s, **spec) for s in range(10)))
        logits = logits_of(random, 10, vocab)
        static[:10] = logits.cuda()
        slots[:10] = torch.arange(10)
        lengths[:10] = 2
        graph.replay()
        wanted = both.by_cpu(logits, np.arange(10))
        assert out[:10].tolist() == wanted.tokens.tolist() and not status.any()
        assert both.gpu_tokens[:10, 2].tolist() == wanted.tokens.tolist()
        assert not both.gpu_tokens[SLOTS].any()
