"""Attention over a paged cache, by plan, against the reference in plain loops."""

import random

import pytest
import torch
from torch import Tensor

from zlm.config import first_seen
from zlm.ops import cpu_attention, kv_cache, reference
from zlm.ops.backend import Geometry
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.ops.cpu_attention import HeadScales
from zlm.ops.scores import Scores

BLOCK_SIZE = 4
HEAD_DIM = 8


class Case:
    """Random rows (query length, context length) with their cache, queries, keys and values."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        window: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        width = -(-max(context for _, context in rows) // BLOCK_SIZE)
        num_blocks = 1 + len(rows) * width
        order = chance.sample(range(1, num_blocks), num_blocks - 1)
        table = torch.zeros((len(rows), width), dtype=torch.int32)
        for row, (length, context) in enumerate(rows):
            for index in range(-(-context // BLOCK_SIZE)):
                seen = (index + 1) * BLOCK_SIZE > first_seen(context - length, window)
                table[row, index] = order.pop() if seen or not window else 0
        old = torch.randn(num_blocks, BLOCK_SIZE, 2, kv_heads, HEAD_DIM)
        self.cache = old.to(kv_dtype)
        positions = torch.cat([torch.arange(c - n, c) for n, c in rows])
        row_of = torch.tensor([row for row, (n, _) in enumerate(rows) for _ in range(n)])
        slots = table[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        lengths = [n for n, _ in rows]
        self.batch = StepBatch(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=positions,
            query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
            seq_lens=torch.tensor([c for _, c in rows], dtype=torch.int32),
            num_decodes=sum(n == 1 for n in lengths),
            query_lens=lengths,
            context_lens=[c for _, c in rows],
            groups=[GroupBatch(slots, table, window)],
        )
        self.qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * HEAD_DIM).to(dtype)
        self.q = self.qkv.view(len(positions), -1, HEAD_DIM)[:, :heads]
        self.kv_scales: Tensor | None = None
        if kv_dtype == kv_cache.FP8:
            self.kv_scales = torch.linspace(0.3, 0.7, 2 * kv_heads).view(2, kv_heads)
        kv_cache.write(self.cache, self.qkv[:, heads * HEAD_DIM :], slots, self.kv_scales)

    def run(self, scale: float = 0.3, softcap: float = 0.0) -> Tensor:
        scales = None
        if self.kv_scales is not None:
            heads = Geometry(self.q.shape[1], self.cache.shape[3], HEAD_DIM)
            scales = HeadScales.of(self.kv_scales, heads)
        out = self.plan().run(self.qkv, self.cache, Scores(scale, softcap), scales)
        return out.view(self.q.shape)

    def plan(self, num_rows: int | None = None) -> cpu_attention.CpuPlan:
        rows = num_rows or self.batch.num_tokens
        heads = Geometry(self.q.shape[1], self.cache.shape[3], HEAD_DIM)
        group = self.batch.groups[0]
        return cpu_attention.plan(self.batch, group, self.cache, heads, rows, self.q.dtype)

    def expected(self, scale: float = 0.3, softcap: float = 0.0) -> Tensor:
        cache = self.cache
        if self.kv_scales is not None:
            cache = cache.float() * self.kv_scales.unsqueeze(-1)
        return reference.attention(self.q, cache, self.batch, 0, scale=scale, softcap=softcap)


def random_rows(seed: int) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    decodes = [(1, chance.randint(1, 60)) for _ in range(chance.randint(0, 6))]
    prefills = []
    for _ in range(chance.randint(0 if decodes else 1, 5)):
        length = chance.choice([2, 3, 7, 7, 7, 20])
        prefills.append((length, length + chance.choice([0, 0, 1, 13, 40])))
    return decodes + prefills


@pytest.mark.parametrize("window", [0, 1, 5, 16, -7, -16])
@pytest.mark.parametrize("seed", range(8))
def test_mixed_rows(seed: int, window: int) -> None:
    case = Case(random_rows(seed), window=window, seed=seed)
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 1), (6, 2)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    case = Case([(1, 9), (1, 30), (5, 5), (6, 11)], heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 6])
def test_softcap(window: int) -> None:
    case = Case([(1, 9), (1, 30), (5, 5), (6, 11)], window=window)
    case.q.mul_(10)
    actual, expected = case.run(1.0, softcap=2.0), case.expected(1.0, softcap=2.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, case.expected(1.0), atol=1e-2)


@pytest.mark.parametrize("window", [0, 24, -24])
def test_rows_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(cpu_attention, "TILE_TOKENS", 16)
    case = Case([(1, 50), (40, 40), (37, 90)], window=window)
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 3000])
def test_packets_of_bounded_size(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(cpu_attention, "PACKET_BYTES", limit)
    case = Case([(1, context) for context in (60, 3, 17, 17, 40, 1)] + [(2, 30), (2, 33)])
    plan = case.plan()
    sizes = [packet.blocks.shape[0] for packet in plan.packets]
    block_bytes = case.cache[0].numel() * case.cache.element_size()
    rows = [packet.rows for packet in plan.packets]
    assert all(size * block_bytes <= limit or r == 1 for size, r in zip(sizes, rows, strict=True))
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


def test_rows_of_like_context_share_a_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "BLOCKS_QUANTUM", 4)
    case = Case([(1, context) for context in (17, 20, 18, 401, 405, 19, 410)])
    plan = case.plan()
    copied = {packet.rows: packet.blocks.shape[0] * BLOCK_SIZE for packet in plan.packets}
    assert copied == {4: 4 * 32, 3: 3 * 416}


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (5, 1)])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16(kv_dtype: torch.dtype, heads: int, kv_heads: int, softcap: float) -> None:
    rows = [(1, 9), (1, 30), (5, 5), (6, 11)]
    case = Case(rows, heads=heads, kv_heads=kv_heads, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    actual = case.run(softcap=softcap)
    assert actual.dtype == torch.bfloat16
    expected = case.expected(softcap=softcap)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no fast bfloat16 products"
)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (5, 1)])
def test_scores_of_prompts_as_products(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, softcap: float
) -> None:
    monkeypatch.setattr(cpu_attention, "PRODUCT_TOKENS", 7)
    monkeypatch.setattr(cpu_attention, "PRODUCT_BYTES", 2 * heads * 20**2)
    rows, kind = [(7, 7), (7, 7), (20, 20), (21, 21), (6, 6)], torch.bfloat16
    case = Case(rows, heads=heads, kv_heads=kv_heads, dtype=kind, kv_dtype=kind)
    masks = [prompts.mask for prompts in case.plan().prompts]
    assert [mask is not None for mask in masks] == [True, True, False, False]
    actual, expected = case.run(softcap=softcap), case.expected(softcap=softcap)
    assert actual.dtype == kind
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_of_heads(dtype: torch.dtype) -> None:
    """The sink of a head that scores far above its keys leaves nothing of their values."""
    case = Case([(1, 9), (1, 30), (3, 11)], heads=6, kv_heads=2, dtype=dtype)
    sinks = torch.zeros(6).index_fill_(0, torch.tensor([1, 4]), 1e4)
    out = case.plan().run(case.qkv, case.cache, Scores(0.3, 0.0, sinks)).view(case.q.shape)
    assert (out.abs().amax((0, 2)) == 0).tolist() == [False, True, False, False, True, False]
    few = torch.full((6,), -1e4)
    out = case.plan().run(case.qkv, case.cache, Scores(0.3, 0.0, few)).view(case.q.shape)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), case.expected(), rtol=error, atol=error)


def test_float32_over_a_bfloat16_cache() -> None:
    case = Case([(1, 9), (5, 5), (6, 11)], kv_dtype=torch.bfloat16)
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_fp8_with_scales_of_heads(dtype: torch.dtype, softcap: float) -> None:
    """Issue 6. Prompts too are read from the cache: how they came in chunks changes nothing."""
    rows = [(1, 9), (1, 30), (5, 5), (20, 31)]
    case = Case(rows, dtype=dtype, kv_dtype=kv_cache.FP8, window=16)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    actual, expected = case.run(softcap=softcap).float(), case.expected(softcap=softcap)
    torch.testing.assert_close(actual, expected, rtol=error, atol=error)
    assert not case.plan().prompts


@pytest.mark.parametrize("rows", [[(1, 9)], [(1, 20), (1, 3)], [(3, 3)], [(1, 4), (2, 2)]])
def test_padding_rows_are_finite_and_change_nothing(rows: list[tuple[int, int]]) -> None:
    case = Case(rows)
    count = case.batch.num_tokens
    padded = torch.cat((case.qkv, torch.randn(5, case.qkv.shape[1])))
    out = case.plan(count + 5).run(padded, case.cache, Scores(0.3))
    assert out.shape[0] == count + 5
    assert out.isfinite().all()
    expected = case.expected(0.3)
    torch.testing.assert_close(out[:count].view(case.q.shape), expected, rtol=1e-5, atol=1e-5)


def test_what_a_block_held_before_does_not_matter() -> None:
    case = Case([(1, 5), (1, 30), (3, 7)])
    before = case.run()
    table = case.batch.groups[0].block_table
    for row, end in enumerate(case.batch.context_lens):
        for position in range(end, -(-end // BLOCK_SIZE) * BLOCK_SIZE):
            case.cache[table[row, position // BLOCK_SIZE], position % BLOCK_SIZE] = 1e6
    assert torch.equal(case.run(), before)
