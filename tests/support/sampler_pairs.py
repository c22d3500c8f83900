"""The CPU's sampler and the kernels' side by side, over the same sequences, and random mixtures."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from worker_steps import CPU, entries_of, floats, ids, join

from zlm.messages import ROW_OK, Join
from zlm.worker import sampler
from zlm.worker.gpu_sampler import GpuSampler
from zlm.worker.sampling_table import SamplingTable

VOCAB = 180
SLOTS, WIDTH = 15, 40


class Both:
    """The same sequences in the CPU's tables and in the kernels', each with its token table."""

    def __init__(self, vocab: int = VOCAB, device: str = "cpu") -> None:
        self.vocab = vocab
        self.device = torch.device(device)
        self.table = SamplingTable(SLOTS, vocab, CPU)
        self.tokens = torch.zeros(SLOTS + 1, WIDTH, dtype=torch.int32)
        self.gpu_tokens = self.tokens.clone().to(device)
        self.gpu = GpuSampler(SLOTS, vocab, 20, self.gpu_tokens, self.device)
        self.lengths = np.zeros(SLOTS + 1, np.int64)

    def join(self, *joins: Join) -> None:
        for each in joins:
            known = np.frombuffer(each.token_ids, np.int32)
            self.lengths[each.slot] = len(known)
            for tokens in (self.tokens, self.gpu_tokens):
                tokens[each.slot, : len(known)] = torch.from_numpy(known.copy())
        self.table.join(joins)
        self.gpu.join(joins)

    def by_cpu(self, logits: Tensor, slots: np.ndarray) -> sampler.Sampled:
        lengths = torch.from_numpy(self.lengths[slots])
        return sampler.sample(logits.clone(), self.table.rows(slots), lengths, self.tokens)

    def by_gpu(self, logits: Tensor, slots: np.ndarray, padding: int = 0):
        """Return tokens, statuses and reported columns; *padding* rows stand between the others."""
        places = np.arange(len(slots))
        places[1:] += np.minimum(padding, np.arange(len(slots) - 1) // 2 + 1)
        count = len(slots) + padding
        hosts = np.full(count, SLOTS)
        hosts[places] = slots
        padded = torch.full((count, self.vocab), math.nan)
        padded[places] = logits
        lengths = torch.from_numpy(self.lengths[hosts].astype(np.int32)).to(self.device)
        device_slots = torch.from_numpy(hosts.astype(np.int32)).to(self.device)
        out = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        status = torch.full((count,), 9, dtype=torch.uint8, device=self.device)
        padded = padded.to(self.device)
        report = self.launch(padded, device_slots, lengths, hosts, out, status)
        columns = report and report.columns([t.cpu() for t in report.tensors], places)
        return out.cpu()[places], status.cpu()[places], columns

    def launch(self, logits, slots, lengths, hosts, out, status):
        """Sample as a runner does, by the variant that the rows need."""
        to = {"tokens_out": out, "status_out": status}
        variant = self.gpu.variant(hosts)
        if variant is None:
            return self.gpu.full(logits, slots, lengths, hosts, **to)
        return self.gpu.draw(logits, slots, lengths, **to, cut=variant == "cut")

    def step(self, logits: Tensor, slots: np.ndarray, padding: int = 0) -> tuple[list, list]:
        """Draw on both sides, demand that they agree, and go on; return tokens and statuses."""
        wanted = self.by_cpu(logits, slots)
        tokens, status, columns = self.by_gpu(logits, slots, padding)
        assert tokens.tolist() == wanted.tokens.tolist()
        expected = [ROW_OK] * len(slots) if wanted.status is None else wanted.status.tolist()
        assert status.tolist() == expected
        assert (columns is None) == (wanted.logprobs is None)
        if columns is not None:
            compare(columns, wanted.logprobs)
        where = torch.from_numpy(slots), torch.from_numpy(self.lengths[slots])
        self.tokens[where] = wanted.tokens.int()
        assert torch.equal(self.gpu_tokens.cpu(), self.tokens)  # the dummy's row too
        self.lengths[slots] += 1
        return tokens.tolist(), status.tolist()


def compare(got, wanted) -> None:
    """Equal entries; where all that is reported is impossible the alternatives are anyone's."""
    assert (got.rows, got.counts, got.ranks) == (wanted.rows, wanted.counts, wanted.ranks)
    for ours, theirs in zip(entries_of(got), entries_of(wanted), strict=True):
        assert ours[3] == pytest.approx(theirs[3], rel=1e-5, abs=1e-4)
        known = [value > -9999.0 for value in theirs[3]]
        assert [i for i, k in zip(ours[2], known, strict=True) if k] == [
            i for i, k in zip(theirs[2], known, strict=True) if k
        ]


def mixture(random: np.random.Generator, slot: int, vocab: int) -> Join:
    """A sequence that asks for some of everything."""

    def some(count: int) -> bytes:
        return ids(random.choice(vocab, count, replace=False))

    count, likely = int(random.integers(2, 20)), lambda share: random.random() < share
    spec: dict = {"seed": int(random.integers(2**64, dtype=np.uint64))}
    if likely(0.75):
        spec["temperature"] = float(random.choice([1e-6, 0.3, 0.8, 1.0, 1.7]))
        spec |= {"top_k": int(random.choice([1, 5, 40, vocab + 1]))} if likely(0.3) else {}
        spec |= {"top_p": float(random.choice([0.0, 0.5, 0.95]))} if likely(0.3) else {}
        spec |= {"min_p": float(random.choice([0.02, 0.2]))} if likely(0.2) else {}
    for name, low in [("repetition", 0.4), ("presence", -1.5), ("frequency", -1.5)]:
        spec |= {f"{name}_penalty": float(random.uniform(low, 1.8))} if likely(0.3) else {}
    if likely(0.3):
        spec |= {"bias_ids": some(3), "bias_values": floats(random.normal(0, 5, 3))}
    spec |= {"allowed_ids": some(vocab // 2)} if likely(0.25) else {}
    if likely(0.25):
        spec |= {"min_tokens": int(random.integers(1, 22)), "banned_until_min": some(vocab // 4)}
    if likely(0.25):
        spec["bad_words"] = [ids([w]) for w in random.integers(0, vocab, 20)] + [some(2)]
    spec |= {"logprobs": int(random.choice([0, 1, 4, 20]))} if likely(0.3) else {}
    tokens = random.integers(0, min(vocab, 30), count).tolist()
    return join(slot, tokens, int(random.integers(1, count)), **spec)


def logits_of(random: np.random.Generator, count: int, vocab: int = VOCAB) -> Tensor:
    return torch.from_numpy(random.normal(0, 3, (count, vocab)).astype(np.float32))
