"""Batches for the sampling kernels, beside what the worker's own sampler makes of them.

A row is the keywords of a ``SamplingSpec``. ``Batch`` holds the same rows twice: as the worker's
selection and as the kernels' columns; slots are dealt in reverse, so that a slot is not its row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from worker_steps import join

from zlm.worker import sampler
from zlm.worker.sampling_table import SamplingRows, SamplingTable

WIDTH = 48  # of the token table

MIXED: list[dict] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.02},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.6, "min_p": 0.001},
    {"temperature": 0.05, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 2.0, "top_k": 10**6, "top_p": 0.999},
    {"temperature": 1e-4},
    {"temperature": 1.0, "min_p": 1.0},
]


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows with logits float32 [R, V]."""

    logits: Tensor
    slots: Tensor  # int32 [R]
    lengths: Tensor  # int64 [R]: position of the token to draw
    tokens: Tensor  # int32 [slots, WIDTH]
    num_prompt: Tensor  # int64 [slots]
    columns: dict[str, Tensor]  # fields of sampling_columns.Columns
    penalties: dict[str, Tensor]  # repetition, presence, frequency by slot
    rows: SamplingRows

    def worker(self) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [R] and status uint8 [R] of the worker's sampler."""
        sampled = sampler.sample(self.logits.clone(), self.rows, self.lengths, self.tokens)
        status = sampled.status
        return sampled.tokens, torch.zeros_like(sampled.tokens) if status is None else status


def make(
    specs: Sequence[dict], vocab: int, device: str = "cpu", *, seed: int = 0, spread: float = 3.0
) -> Batch:
    """Return a batch of one row a spec, with random logits, tokens and seeds."""
    random = np.random.default_rng(seed)
    count = len(specs)
    slots = np.arange(count)[::-1].copy()
    table = SamplingTable(count, vocab, torch.device(device))
    tokens = torch.from_numpy(random.integers(0, vocab, (count, WIDTH), dtype=np.int32))
    lengths = random.integers(8, WIDTH, count)
    prompts = random.integers(1, 8, count)
    seeds = random.integers(0, 2**64, count, dtype=np.uint64)
    given = [
        {"temperature": 0.0, "seed": int(s), **spec} for s, spec in zip(seeds, specs, strict=True)
    ]
    table.join(
        [
            join(int(slot), tokens[slot, :length].tolist(), int(prompt), **spec)
            for slot, length, prompt, spec in zip(slots, lengths, prompts, given, strict=True)
        ]
    )

    def column(name: str, default: float, kind: torch.dtype) -> Tensor:
        values = torch.empty(count, dtype=kind)
        values[slots] = torch.tensor([spec.get(name, default) for spec in given], dtype=kind)
        return values.to(device)

    real = torch.float32
    columns = {
        "seeds": torch.from_numpy(np.array([s["seed"] for s in given], np.uint64).view(np.int64)),
        "temperature": column("temperature", 0.0, real),
        "min_p": column("min_p", 0.0, real),
        "top_k": column("top_k", 0, torch.int32),
        "top_p": column("top_p", 1.0, real),
    }
    columns["seeds"] = columns["seeds"][torch.from_numpy(slots)].to(device)  # its own inverse
    greedy = (columns["top_k"] == 1) | (columns["top_p"] <= 0)
    columns["temperature"][greedy] = 0.0
    num_prompt = torch.empty(count, dtype=torch.int64)
    num_prompt[slots] = torch.from_numpy(prompts)
    logits = torch.from_numpy(random.normal(0, spread, (count, vocab)).astype(np.float32))
    return Batch(
        logits=logits.to(device),
        slots=torch.from_numpy(slots.astype(np.int32)).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        tokens=tokens.to(device),
        num_prompt=num_prompt.to(device),
        columns=columns,
        penalties={
            "repetition": column("repetition_penalty", 1.0, real),
            "presence": column("presence_penalty", 0.0, real),
            "frequency": column("frequency_penalty", 0.0, real),
        },
        rows=table.rows(slots),
    )


def pack_bits(allowed: Tensor) -> Tensor:
    """Return bool [M, V] as int32 [M, ceil(V / 32)], lowest bit first."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).view(
        len(allowed), -1, 32
    )
    bits = padded.to(torch.int64) << torch.arange(32, device=allowed.device)
    return bits.sum(-1).to(torch.int32)


def kept(logits: Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> Tensor:
    """Return which ids of one row [V] may be drawn, bool [V], by sorting, in float64."""
    scaled = (logits.double() - logits.double().max()) / temperature
    ordered = scaled.sort(descending=True).values
    weights = scaled.exp()
    stays = (weights >= min_p) & (scaled > -torch.inf)
    if top_k > 0:
        stays &= scaled >= ordered[min(top_k, len(ordered)) - 1]
    if top_p < 1.0:
        mass = torch.where(ordered >= scaled[stays].min(), ordered.exp(), 0.0)
        before = mass.cumsum(0) - mass
        inside = int((before < top_p * mass.sum()).sum())
        stays &= scaled >= ordered[inside - 1]
    return stays
