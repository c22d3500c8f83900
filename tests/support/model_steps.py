"""Steps of every kind through a tiny model, for comparing one backend or company with another."""

import torch
from paged_steps import Padding, PagedSequences
from tiny_models import RandomWeights

from zlm.config import ModelSpec
from zlm.models import registry, shares
from zlm.ops.backend import Ops
from zlm.ops.parallel import ALONE, Parallel

# Steps as (sequence, tokens) a row, in order: a prefill, a mixed step whose second row is a chunk
# with context behind it, decodes alone of few and of many rows, a chunk alone.
STEPS = [
    [(0, 14), (1, 9)],
    [(0, 1), (1, 5), (2, 17), (3, 2)],
    [(0, 1), (1, 1)],
    [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],
    [(2, 8)],
]
PADDING = Padding(decodes=1, rows=2, tokens=2)


def sequences(
    spec: ModelSpec,
    ops: Ops,
    weights: RandomWeights | None = None,
    block_size: int = 4,
    parallel: Parallel = ALONE,
) -> PagedSequences:
    """Return sequences of the model of *spec* with *weights* (None: random ones).

    parallel: the ranks, of which this one has its part.
    """
    weights = weights or RandomWeights(spec)
    length = spec.max_position
    model = registry.build(spec, weights, ops=ops, max_model_len=length, parallel=parallel)
    own = shares.spec_of_rank(spec, parallel.size)
    return PagedSequences(
        model, own, num_blocks=60, block_size=block_size, ops=ops, dtype=ops.dtype
    )


def prompt(spec: ModelSpec, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, spec.vocab_size, (length,), generator=generator).tolist()


def run(
    spec: ModelSpec, runner: PagedSequences, padding: Padding | None = None, times: int = 1
) -> torch.Tensor:
    """Return the logits of all tokens of STEPS; rows of many tokens have *times* as many."""
    logits = []
    for i, rows in enumerate(STEPS):
        ids = [(s, prompt(spec, n * times if n > 1 else 1, 100 * i + s)) for s, n in rows]
        logits += runner.step(ids, padding)
    return torch.cat(logits)


def in_company(spec: ModelSpec, ops: Ops, times: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence's logits, prefilled alone, and in chunks and decodes among others'."""
    ids, other = prompt(spec, 9 + 10 * times, 0), prompt(spec, 4 + 26 * times, 1)
    (whole,) = sequences(spec, ops).step([(0, ids)])
    runner = sequences(spec, ops)
    first, later = 7 * times, 8 * times
    a, b = [first, 1, 1, later], [6 * times, 1, 5 * times, 8]
    mine, theirs = (
        [tokens[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(4)]
        for tokens, counts in ((ids, a), (other, b))
    )
    done = sum(a)
    pieces = [
        runner.step([(1, theirs[0]), (0, mine[0])])[1],
        runner.step([(1, theirs[1]), (0, mine[1])], PADDING)[1],
        runner.step([(0, mine[2]), (1, theirs[2])], PADDING)[0],
        runner.step([(2, other[:1]), (1, theirs[3]), (0, mine[3])], PADDING)[2],
    ]
    for i in range(done, len(ids)):
        company = [(3 + i, other[:1]), (100 + i, other[1:2])] if i % 2 else []
        rows = [*company, (0, ids[i : i + 1]), (2, other[i : i + 1])]
        pieces.append(runner.step(rows)[len(company)])
    return torch.cat(pieces), whole
