"""The GPU backend's operations in Triton's interpreter, each against the CPU backend's."""

from dataclasses import replace

import pytest
import torch
import triton_interpreter
from torch import Tensor

triton_interpreter.enable()

from zlm.errors import ConfigError, ModelError  # noqa: E402
from zlm.ops import gpu_widened  # noqa: E402
from zlm.ops.backend import Geometry  # noqa: E402
from zlm.ops.batch import GroupBatch, StepBatch  # noqa: E402
from zlm.ops.cpu import CpuOps  # noqa: E402
from zlm.ops.gpu import GpuOps  # noqa: E402
from zlm.ops.gpu_attention import TiledPrefill  # noqa: E402
from zlm.ops.kv_cache import FP8  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

CPU = torch.device("cpu")
EPS = 1e-6
ROWS = [1, 4, 5, 70]  # the last two are the library's
KINDS = {"fast": {}, "fixed": {"deterministic": True}}


def gpu_ops(dtype: torch.dtype = torch.float32, **options: object) -> GpuOps:
    return GpuOps(CPU, dtype, **options)  # type: ignore[arg-type]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("with_norm", [False, True], ids=["", "norm"])
def test_product(rows: int, kind: str, with_bias: bool, with_norm: bool) -> None:
    x, weight, residual = random(rows, 40), random(24, 40, seed=1), random(rows, 24, seed=2)
    bias = random(24, seed=3) if with_bias else None
    results = []
    for ops in (CpuOps(torch.float32), gpu_ops(**KINDS[kind])):
        norm = ops.norm(random(40, seed=4), EPS) if with_norm else None
        product = ops.linear(weight, bias)
        results.append((product(x, norm), product.add(x, residual.clone(), norm)))
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_product_of_narrow_weights(rows: int, kind: str) -> None:
    """Its result, 1e5 and more, is beyond float16; so is the residual that it is added to."""
    x, weight, bias = random(rows, 40), random(24, 40, seed=1) * 1e4, random(24, seed=2)
    residual = random(rows, 24, seed=3) * 1e6
    narrow = x.half(), weight.half(), bias.half()
    product = gpu_ops(torch.float16, **KINDS[kind]).linear(*narrow[1:], wide=True)
    expected = narrow[0].float() @ narrow[1].float().t() + narrow[2].float()
    actual = product(narrow[0])
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1.0)
    actual = product.add(narrow[0], residual.clone())
    torch.testing.assert_close(actual, residual + expected, rtol=1e-5, atol=1.0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(rows: int, kind: str, activation: str) -> None:
    x, gate, up = random(rows, 40), random(24, 40, seed=1), random(24, 40, seed=2)
    results = []
    for ops in (CpuOps(torch.float32), gpu_ops(**KINDS[kind])):
        norm = ops.norm(random(40, seed=3), EPS)
        plain = ops.gated(gate, up, None, None, activation)
        biased = ops.gated(gate, up, random(24, seed=4), random(24, seed=5), activation)
        results.append((plain(x), biased(x, norm)))
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_row_has_the_same_bits_in_any_company(rows: int) -> None:
    ops, x = gpu_ops(torch.bfloat16, deterministic=True), random(70, 72).bfloat16()
    weight = random(48, 72, seed=1).bfloat16()
    norm = ops.norm(random(72, seed=2), EPS)
    gated, product = ops.gated(weight, weight, None, None, "silu"), ops.linear(weight, wide=True)
    for run in (lambda x: gated(x, norm), lambda x: product(x, norm)):
        assert torch.equal(run(x[-rows:].contiguous()), run(x)[-rows:])


@pytest.mark.parametrize("residual_type", [torch.float32, torch.float16])
def test_sandwich(residual_type: torch.dtype) -> None:
    x, hidden = random(3, 48) * 40, (random(3, 48, seed=1) * 300).to(residual_type)
    results = []
    for ops in (CpuOps(torch.float16), gpu_ops(torch.float16)):
        inner, outer = (ops.norm(random(48, seed=seed), EPS) for seed in (2, 3))
        results.append(ops.sandwich(x.to(residual_type), hidden.clone(), inner, outer))
    (hidden_cpu, normed_cpu), (hidden_gpu, normed_gpu) = results
    assert hidden_gpu.dtype == residual_type and normed_gpu.dtype == torch.float16
    close(hidden_gpu, hidden_cpu, 1e-6 if residual_type == torch.float32 else 2e-3)
    close(normed_gpu, normed_cpu, 4e-3)


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_tied_head_shares_the_embedding(rows: int, softcap: float) -> None:
    weight = random(50, 32)
    hidden, ids = random(rows, 32, seed=1), torch.tensor([3, 49, 0])
    ops, reference = gpu_ops(), CpuOps(torch.float32)
    embedding, head = ops.embedding(weight, 5.7, torch.float32), ops.lm_head(weight, softcap)
    close(embedding(ids), weight[ids] * 5.7)
    close(head(hidden), reference.lm_head(weight, softcap)(hidden))
    weight.mul_(2)
    close(head(hidden), reference.lm_head(weight, softcap)(hidden))


def test_head_of_bfloat16_gives_float32() -> None:
    weight, hidden = random(50, 32).bfloat16(), random(6, 32, seed=1).bfloat16()
    head = gpu_ops(torch.bfloat16).lm_head(weight, 0.0)
    for rows in (1, 6):
        close(head(hidden[:rows]), hidden[:rows].float() @ weight.float().t())


def test_caches() -> None:
    ops = gpu_ops(torch.bfloat16)
    cache = ops.allocate_cache(5, 16, 2, 8, torch.bfloat16)
    assert not cache.any()
    assert 5 * ops.block_bytes(16, 2, 8, torch.bfloat16) == cache.numel() * 2
    cache[3] = 7
    ops.copy_blocks([cache], [3], [1])
    assert (cache[1] == 7).all() and not cache[2].any()
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype float32: .* compute type, bfloat16"):
        ops.allocate_cache(5, 16, 2, 8, torch.float32)


def test_deterministic_with_sdpa_is_refused() -> None:
    with pytest.raises(ConfigError, match="--deterministic needs --attention-backend triton"):
        gpu_ops(attention="sdpa", deterministic=True)


def test_wider_heads_than_the_kernels_take_are_refused() -> None:
    norms = {"q_norm": None, "k_norm": None, "eps": EPS}
    with pytest.raises(ModelError, match="heads of 640 values: on a GPU they may have 512"):
        gpu_ops().attention(Geometry(4, 1, 640), scale=1.0, softcap=0.0, **norms)


def step(rows: list[tuple[int, int]], table: Tensor, window: int) -> StepBatch:
    """A step of *rows* (tokens, context), those of one token first; blocks of 16."""
    counts = torch.tensor([count for count, _ in rows])
    positions = torch.cat([torch.arange(context - count, context) for count, context in rows])
    row_of = torch.arange(len(rows)).repeat_interleave(counts)
    slots = table[row_of, positions // 16].long() * 16 + positions % 16
    return StepBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_starts=torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        num_decodes=sum(count == 1 for count, _ in rows),
        query_lens=counts.tolist(),
        context_lens=[context for _, context in rows],
        groups=[GroupBatch(slots, table, window)],
    )


@pytest.mark.parametrize("attention", ["triton", "sdpa", "fixed"])
@pytest.mark.parametrize("window", [0, 10, -10])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_attention(attention: str, window: int, softcap: float) -> None:
    """Decodes and chunks over a cache of random keys and values, with norms of q and k."""
    geometry = Geometry(4, 2, 16)
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).add(1).view(4, 3).int()
    batch = step([(1, 37), (1, 1), (9, 40), (2, 2)], table, window)
    angles = random(64, 8)
    rotary = torch.polar(torch.ones_like(angles), angles)
    qkv = random(batch.num_tokens, geometry.row, seed=1)
    old = random(13, 16, 2, 2, 16, seed=2)  # the CPU's layout
    if attention == "fixed":
        other = gpu_ops(deterministic=True)
    else:
        other = gpu_ops(attention=attention)
    results = []
    for ops in (CpuOps(torch.float32), other):
        cache = old.clone() if isinstance(ops, CpuOps) else old.permute(0, 3, 2, 1, 4).contiguous()
        layer = ops.attention(
            geometry,
            scale=0.4,
            softcap=softcap,
            q_norm=random(16, seed=3),
            k_norm=random(16, seed=4),
            eps=EPS,
        )
        needed = batch
        if not ops.needs_lengths:
            needed = replace(batch, query_lens=[], context_lens=[])
        work = ops.plan(needed, 0, cache, geometry)
        out = layer(qkv.clone(), ops.rotation(rotary, needed, geometry), cache, work)
        results.append((out[: batch.num_tokens], cache))
    (expected, cpu_cache), (actual, gpu_cache) = results
    close(actual, expected)
    close(gpu_cache, cpu_cache.permute(0, 3, 2, 1, 4))


@pytest.mark.parametrize("attention", ["triton", "sdpa"])
def test_attention_over_fp8(attention: str) -> None:
    """Issue 6: what is stored and what comes of it are the CPU's, with a scale for each head."""
    geometry = Geometry(4, 2, 16)
    table = torch.arange(1, 13).view(4, 3).int()
    batch = step([(1, 37), (9, 40), (2, 2)], table[:3], 0)
    qkv, old = random(batch.num_tokens, geometry.row, seed=1), random(13, 16, 2, 2, 16, seed=2)
    scales = torch.tensor([[0.02, 0.03], [0.05, 0.01]])
    angles = random(64, 8)
    rotary = torch.polar(torch.ones_like(angles), angles)
    results = []
    for ops in (
        CpuOps(torch.float32, kv_dtype=FP8),
        gpu_ops(kv_dtype=FP8, attention=attention),
    ):
        filled = old if isinstance(ops, CpuOps) else old.permute(0, 3, 2, 1, 4).contiguous()
        cache = ops.allocate_cache(13, 16, 2, 16, FP8)
        cache.copy_(filled.to(FP8))
        how = {"q_norm": None, "k_norm": None, "eps": EPS, "kv_scales": scales}
        layer = ops.attention(geometry, scale=0.4, softcap=0.0, **how)
        work = ops.plan(batch, 0, cache, geometry)
        out = layer(qkv.clone(), ops.rotation(rotary, batch, geometry), cache, work)
        ops.copy_blocks([cache], [1], [12])
        results.append((out[: batch.num_tokens], cache.float()))
    (expected, cpu_cache), (actual, gpu_cache) = results
    close(actual, expected, 2e-3)  # a key between two numbers may be rounded either way
    off = (gpu_cache != cpu_cache.permute(0, 3, 2, 1, 4)).float().mean()
    assert off < 1e-3 and torch.equal(gpu_cache[12], gpu_cache[1])


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("room", [4, 8])  # blocks: the second row of four has room, or has not
def test_prompts_over_fp8_are_read_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, window: int, room: int
) -> None:
    """Issue 6: decodes and short chunks by the cache, prompts widened, and the same comes of it."""
    monkeypatch.setattr(gpu_widened, "LEAST_TOKENS", 70)
    monkeypatch.setattr(gpu_widened, "LEAST_TILES", 1)
    geometry = Geometry(4, 2, 16)
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).add(1).view(4, 3).int()
    batch = step([(1, 37), (3, 9), (33, 40), (35, 35)], table, window)
    qkv = random(batch.num_tokens, geometry.row, seed=1).half()
    old = random(13, 2, 2, 16, 16, seed=2).to(FP8)
    angles = random(64, 8)
    rotary = torch.polar(torch.ones_like(angles), angles)
    scales = torch.tensor([[0.2, 0.3], [0.5, 0.1]])
    results = []
    for size in (0, room * 2 * 2 * 16 * 16 * 2):
        ops = gpu_ops(torch.float16, kv_dtype=FP8, widened_bytes=size)
        cache = ops.allocate_cache(13, 16, 2, 16, FP8)
        cache.copy_(old)
        how = {"q_norm": None, "k_norm": None, "eps": EPS, "kv_scales": scales}
        layer = ops.attention(geometry, scale=0.4, softcap=0.0, **how)
        work = ops.plan(batch, 0, cache, geometry)
        assert isinstance(work.prefill, TiledPrefill)
        found = work.prefill.widened
        bases = None if found is None else found.bases.tolist()
        assert bases == (None if not size else [-1, 0, 3 if room > 5 else -1])
        last = work.last_tokens().prefill
        assert isinstance(last, TiledPrefill) and last.widened is None
        results.append(layer(qkv.clone(), ops.rotation(rotary, batch, geometry), cache, work))
    close(results[1].float(), results[0].float(), 2e-3)


def test_a_deterministic_prompt_over_fp8_is_read_as_it_is() -> None:
    ops = gpu_ops(torch.float16, kv_dtype=FP8, widened_bytes=2**20, deterministic=True)
    cache = ops.allocate_cache(4, 16, 2, 16, FP8)
    table = torch.zeros((1, 80), dtype=torch.int32)
    work = ops.plan(step([(1200, 1200)], table, 0), 0, cache, Geometry(4, 2, 16))
    assert isinstance(work.prefill, TiledPrefill) and work.prefill.widened is None
