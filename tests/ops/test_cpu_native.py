"""The CPU's compiled kernels against torch's operations, which they take the place of."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zlm.ops import cpu_native
from zlm.ops.backend import Geometry
from zlm.ops.batch import GroupBatch, StepBatch
from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_native import NativeKernels
from zlm.ops.cpu_norm import RMSNorm

BLOCK_SIZE = 4
LONGEST = 300


def step(lengths: list[int], contexts: list[int], window: int = 0, seed: int = 0) -> StepBatch:
    """Return a step with scattered blocks; rows of one token come first in *lengths*."""
    chance = random.Random(seed)
    width = -(-max(contexts) // BLOCK_SIZE)
    blocks = chance.sample(range(1, 1 + len(lengths) * width), len(lengths) * width)
    table = torch.tensor(blocks, dtype=torch.int32).view(len(lengths), width)
    positions = torch.cat([torch.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)])
    row_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = table[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        num_decodes=sum(length == 1 for length in lengths),
        query_lens=lengths,
        context_lens=contexts,
        groups=[GroupBatch(slots, table, window)],
    )


class Layer:
    """One layer's attention and what it is given, for ops with kernels and without."""

    def __init__(
        self,
        batch: StepBatch,
        heads: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        *,
        rotation: str = "turns",
        reads_only: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.batch, self.geometry, self.dtype = batch, Geometry(*heads), dtype
        self.options: dict[str, Any] = {"scale": 0.2, "softcap": 0.0, "q_norm": None}
        self.options |= {"k_norm": None, "eps": 1e-5, "reads_only": reads_only, **options}
        blocks = int(batch.groups[0].block_table.max()) + 1
        self.cache = torch.randn(blocks, BLOCK_SIZE, 2, *heads[1:]).to(dtype)
        width = self.geometry.q_row if reads_only else self.geometry.row
        self.qkv = torch.randn(batch.num_tokens, width).to(dtype)
        angles = torch.randn(LONGEST, heads[2] // 2)
        self.table = torch.polar(torch.ones_like(angles), angles)
        if rotation == "factor":
            self.table = torch.rand(LONGEST)[:, None].expand(-1, heads[2] // 2) + 0.5
            self.table = self.table[:, :1].expand(-1, heads[2] // 2)

    def run(self, native: NativeKernels | None, batch: StepBatch | None = None) -> Tensor:
        """Return the attention of the first rows, those of *batch*; store what it stores."""
        ops, batch = CpuOps(self.dtype, native=native), batch or self.batch
        attention = ops.attention(self.geometry, **self.options)
        rotation = ops.rotation(self.table, batch, self.geometry)
        work = ops.plan(batch, 0, self.cache, self.geometry)
        assert (work.decodes is not None) == (native is not None and batch.num_decodes > 0)
        qkv = self.qkv[: batch.num_tokens].clone()
        return attention(qkv, rotation, self.cache, work)[: batch.num_tokens]

    def compare(self, native: NativeKernels) -> None:
        """Compare what is returned, and what is in the cache after it."""
        before = self.cache.clone()
        expected = self.run(None)
        stored = self.cache.clone()
        self.cache.copy_(before)
        actual = self.run(native)
        narrow = self.dtype == torch.bfloat16
        tolerances = {"rtol": 2e-2, "atol": 2e-2} if narrow else {"rtol": 2e-5, "atol": 1e-5}
        torch.testing.assert_close(actual, expected, **tolerances)
        torch.testing.assert_close(self.cache, stored, **tolerances)
        assert not torch.equal(before, stored) or self.options["reads_only"]


MIXED = ([1, 1, 1, 1, 3, 20], [1, 5, 64, 131, 9, 20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads", [(1, 1, 16), (9, 3, 64), (4, 1, 80), (8, 8, 128), (10, 2, 96), (7, 1, 512)]
)
def test_heads(native_kernels: NativeKernels, heads: tuple[int, int, int], dtype: Any) -> None:
    Layer(step(*MIXED), heads, dtype).compare(native_kernels)


@pytest.mark.parametrize("window", [1, 5, 64, 70, -7, -64])
@pytest.mark.parametrize("seed", range(3))
def test_windows(native_kernels: NativeKernels, window: int, seed: int) -> None:
    chance = random.Random(seed)
    contexts = [chance.randint(1, 200) for _ in range(9)]
    Layer(step([1] * 9, contexts, window, seed), (4, 2, 32)).compare(native_kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_softcap_and_sinks(native_kernels: NativeKernels, dtype: torch.dtype) -> None:
    norms = {"q_norm": torch.rand(32) + 0.5, "k_norm": torch.rand(32) + 0.5}
    for options in (
        norms,
        {"softcap": 2.0, "scale": 3.0},
        {"sinks": torch.linspace(-2, 4, 6)},
        {"value_norm": True, **norms},
        {"q_norm": torch.rand(192) + 0.5, "k_norm": torch.rand(64) + 0.5},  # over all heads
        {"rotation": "factor"},
        {"rotation": "factor", "sinks": torch.ones(6), "softcap": 1.0, **norms},
    ):
        Layer(step(*MIXED), (6, 2, 32), dtype, **options).compare(native_kernels)  # type: ignore[arg-type]


def test_keys_of_another_layer(native_kernels: NativeKernels) -> None:
    for norm in (None, torch.rand(32) + 0.5):
        layer = Layer(step(*MIXED), (6, 2, 32), reads_only=True, q_norm=norm)
        before = layer.cache.clone()
        layer.compare(native_kernels)
        assert torch.equal(layer.cache, before)


@pytest.mark.parametrize("options", [{}, {"sinks": torch.linspace(-2, 4, 6)}])
@pytest.mark.parametrize("window", [0, 150])
def test_sequences_in_parts(
    native_kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch, options: Any, window: int
) -> None:
    batch = step([1, 1, 1, 5], [280, 3, 101, 30], window)
    whole = Layer(batch, (6, 2, 32), **options).run(native_kernels)
    monkeypatch.setattr(cpu_native, "PART_KEYS", 50)
    Layer(batch, (6, 2, 32), **options).compare(native_kernels)
    parts = Layer(batch, (6, 2, 32), **options).run(native_kernels)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_in_any_company(native_kernels: NativeKernels) -> None:
    batch = step([1] * 8, [31, 200, 7, 64, 65, 128, 1, 90])
    layer = Layer(batch, (6, 2, 32), torch.bfloat16)
    expected = layer.run(native_kernels)
    group = batch.groups[0]
    few = replace(
        batch,
        token_ids=batch.token_ids[:2],
        positions=batch.positions[:2],
        query_starts=batch.query_starts[:3],
        seq_lens=batch.seq_lens[:2],
        num_decodes=2,
        query_lens=batch.query_lens[:2],
        context_lens=batch.context_lens[:2],
        groups=[replace(group, slot_mapping=group.slot_mapping[:2])],
    )
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(layer.run(native_kernels), expected)
        assert torch.equal(layer.run(native_kernels, few), expected[:2])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_what_is_no_number_shows_in_its_own_row_alone(
    native_kernels: NativeKernels, broken: float, part: str
) -> None:
    """The cache is scrubbed by what the hidden states show; see ``kv_cache.scrub``."""
    layer = Layer(step([1, 1, 1], [70, 40, 9]), (2, 1, 32))
    expected = layer.run(native_kernels)
    layer.qkv[1, {"query": 3, "key": 67, "value": 99}[part]] = broken
    actual = layer.run(native_kernels)
    assert not actual[1].isfinite().all()
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_rows_of_padding_are_zeros(native_kernels: NativeKernels) -> None:
    ops = CpuOps(torch.bfloat16, native=native_kernels)
    ops._min_rows = 5
    batch, geometry = step([1, 1], [70, 40]), Geometry(2, 1, 32)
    cache = torch.randn(60, BLOCK_SIZE, 2, 1, 32).bfloat16()
    attention = ops.attention(geometry, scale=0.2, softcap=0.0, q_norm=None, k_norm=None, eps=1e-5)
    table = torch.ones(LONGEST, 16, dtype=torch.complex64)
    qkv = torch.full((5, geometry.row), float("nan")).bfloat16()
    qkv[:2] = 1.0
    work = ops.plan(batch, 0, cache, geometry)
    out = attention(qkv, ops.rotation(table, batch, geometry), cache, work)
    assert out.shape == (5, 64) and out[:2].isfinite().all() and not out[2:].any()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (5, 576), (40, 2048), (0, 32)])
def test_norm_of_rows(
    native_kernels: NativeKernels, shape: tuple[int, int], dtype: torch.dtype, out: torch.dtype
) -> None:
    torch.manual_seed(0)
    for scale in (1e-6, 1.0, 1e5):
        x, weight = (torch.randn(shape) * scale).to(dtype), torch.randn(shape[1])
        actual = RMSNorm(weight, 1e-5, out, native_kernels)(x)
        expected = RMSNorm(weight, 1e-5, out)(x)
        assert actual.dtype == out
        rounding = 1e-5 if out == torch.float32 else 1e-2
        torch.testing.assert_close(actual, expected, rtol=rounding, atol=1e-7)


def test_norm_of_what_the_kernel_does_not_take(native_kernels: NativeKernels) -> None:
    for x in (torch.randn(3, 20), torch.randn(2, 3, 32), torch.randn(3, 32).half()):
        weight = torch.randn(x.shape[-1])
        actual = RMSNorm(weight, 1e-5, None, native_kernels)(x)
        assert torch.equal(actual, RMSNorm(weight, 1e-5)(x))
