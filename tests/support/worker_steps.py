"""A deterministic model for runner tests, and builders of step messages.

``FakeModel`` writes a number for every token into the cache and reads its context back through
the block tables, so a wrong slot, block, position or copy changes its logits. Its hidden state of a
token is the context's digest; its logits are a fixed pseudo-random function of that.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Execute, Join, Masks, SamplingSpec
from zlm.ops import kv_cache
from zlm.ops.batch import StepBatch
from zlm.worker.model_runner import ModelRunner
from zlm.worker.slots import SlotTables

VOCAB, BLOCK = 97, 4
CPU = torch.device("cpu")


class FakeModel:
    """Hidden state of token t: a digest of tokens max(0, t - window + 1)..t of its sequence."""

    def __init__(self, windows: list[int]) -> None:
        self.windows = windows
        self.batches: list[StepBatch] = []
        self.poison: set[int] = set()  # last token ids whose logits are NaN

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        self.batches.append(batch)
        assert all(n == 1 for n in batch.query_lens[: batch.num_decodes])
        assert all(n > 1 for n in batch.query_lens[batch.num_decodes :])
        hidden = torch.zeros(batch.num_tokens, 2, dtype=torch.float64)
        for layer, (group, cache) in enumerate(zip(batch.groups, caches, strict=True)):
            marks = ((batch.token_ids + 1) * 31 + batch.positions * 7 + layer).float()
            kv = marks.view(-1, 1, 1, 1).expand(-1, 2, *cache.shape[3:]).clone()
            kv_cache.write(cache, kv, group.slot_mapping)
            hidden[:, 0] += self._digests(batch, group, cache)
        hidden[:, 1] = batch.token_ids.double()
        return hidden

    def _digests(self, batch: StepBatch, group, cache: Tensor) -> Tensor:
        digests, starts = [], batch.query_starts.tolist()
        for row, count in enumerate(batch.query_lens):
            blocks = group.block_table[row].long()
            stored = cache[blocks].flatten(0, 1)[:, 0, 0, 0].double()
            for t in batch.positions[starts[row] : starts[row] + count].tolist():
                first = max(0, t + 1 - group.window) if group.window else 0
                places = torch.arange(first, t + 1)
                digests.append((stored[first : t + 1] * (places * 13 + 5)).sum() % 10007)
        return torch.stack(digests)

    def logits(self, hidden: Tensor) -> Tensor:
        ids = torch.arange(VOCAB, dtype=torch.float64)
        logits = (torch.sin(hidden[:, :1] * 0.37 + ids * 1.91) * 6).float()
        for row, token in enumerate(hidden[:, 1].tolist()):
            if int(token) in self.poison:
                logits[row] = float("nan")
        return logits


@dataclass
class Harness:
    """A runner with a fake model, and a caller that keeps block tables as an engine would."""

    windows: list[int] = field(default_factory=lambda: [0])
    num_slots: int = 8
    max_model_len: int = 64
    num_blocks: int = 128

    def __post_init__(self) -> None:
        self.model = FakeModel(self.windows)
        self.caches = [
            kv_cache.allocate(self.num_blocks, BLOCK, 1, 2, torch.float32, CPU)
            for _ in self.windows
        ]
        self.tables = SlotTables(
            num_slots=self.num_slots,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            num_groups=len(self.windows),
            block_size=BLOCK,
            device=CPU,
        )
        self.runner = ModelRunner(
            self.model,
            self.caches,
            self.tables,
            group_layers=[[layer] for layer in range(len(self.windows))],
            windows=self.windows,
            block_size=BLOCK,
            vocab_size=VOCAB,
        )
        self.steps = 0
        self.next_block = 1
        self.held: dict[int, int] = {}  # blocks of each slot

    def step(self, rows, joins=(), entries=(), copies=()):
        """Run *rows* of (slot, start, count, sample); blocks that they need are given to them.

        *entries*: (group, slot, index, block) set by the caller; such blocks are not given again.
        """
        for join in joins:
            self.held[join.slot] = 0
        entries = list(entries)
        for _, slot, index, _ in entries:
            self.held[slot] = max(self.held[slot], index + 1)
        for slot, start, count, _ in rows:
            while self.held[slot] * BLOCK < start + count:
                for group in range(len(self.windows)):
                    entries.append((group, slot, self.held[slot], self.next_block))
                self.held[slot] += 1
                self.next_block += 1
        self.steps += 1
        return self.runner.execute(execute(self.steps, rows, joins, entries, copies))


def masks_of(step: int, masks: dict[int, list[int]], vocab_size: int = VOCAB) -> Masks:
    """Return the masks of a step: the ids that sampling rows may only use, by their number."""
    bits = np.zeros((len(masks), -(-vocab_size // 32) * 32), np.bool_)
    for row, allowed in zip(bits, masks.values(), strict=True):
        row[allowed] = True
    words = np.packbits(bits, axis=1, bitorder="little")
    return Masks(step, np.array(list(masks), np.int32).tobytes(), words.tobytes())


def execute(step, rows, joins=(), entries=(), copies=()) -> Execute:
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    table = np.array(entries, np.int32).reshape(-1, 4).T
    return Execute(
        step,
        *(column.tobytes() for column in columns[:3]),
        columns[3].astype(np.uint8).tobytes(),
        joins=list(joins),
        table_groups=table[0].tobytes(),
        table_slots=table[1].tobytes(),
        table_indices=table[2].tobytes(),
        table_blocks=table[3].tobytes(),
        copies=list(copies),
    )


def join(slot: int, tokens: list[int], num_prompt: int | None = None, **sampling) -> Join:
    sampling.setdefault("temperature", 0.0)
    sampling.setdefault("seed", 1)
    return Join(slot, ids(tokens), num_prompt or len(tokens), SamplingSpec(**sampling))


def ids(tokens) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def floats(values) -> bytes:
    return np.array(values, np.float32).tobytes()


def tokens_of(result) -> list[int]:
    return np.frombuffer(result.token_ids, np.int32).tolist()


def entries_of(columns) -> list[tuple[int, int, list[int], list[float]]]:
    """Return (row, rank, ids, values) of every entry of LogprobColumns."""
    rows, counts, ranks, flat = (
        np.frombuffer(c, np.int32).tolist()
        for c in (columns.rows, columns.counts, columns.ranks, columns.ids)
    )
    values, out, at = np.frombuffer(columns.values, np.float32).tolist(), [], 0
    for row, count, rank in zip(rows, counts, ranks, strict=True):
        out.append((row, rank, flat[at : at + count], values[at : at + count]))
        at += count
    assert at == len(flat) == len(values)
    return out
