"""Cases and paged caches for the attention, rotary and norm kernels: one table for both suites.

``tests/kernels`` runs the small cases in Triton's interpreter, ``tests/gpu`` the real ones
compiled. Kernels are imported when they are run: the interpreter must have been turned on before.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zlm.config import first_seen


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A geometry and the lengths of its rows; for prefill also the tokens new in this step."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    queries: tuple[int, ...] = ()
    window: int = 0
    softcap: float = 0.0
    block_size: int = 16
    sinks: bool = False
    kv: str = ""  # "fp8": the cache is e4m3; "fp8-scaled": and has a scale for each head

    def how(self, device: str) -> dict[str, Any]:
        """Return the keywords of kernels and references."""
        sinks = torch.linspace(-1.0, 2.0, self.num_heads, device=device) if self.sinks else None
        return {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": sinks,
            "kv_scales": self.kv_scales(device),
        }

    def kv_scales(self, device: str) -> Tensor | None:
        """Return float32 [2, Hkv] if there are scales; keys and values of 8 fit e4m3 by them."""
        if self.kv != "fp8-scaled":
            return None
        values = torch.linspace(0.011, 0.03, 2 * self.num_kv_heads, device=device)
        return values.view(2, self.num_kv_heads)

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float8_e4m3fn if self.kv else dtype

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        return f"{self.name}-{self.kv}" if self.kv else self.name


def in_fp8(cases: list[AttentionCase]) -> list[AttentionCase]:
    """Return *cases* with caches of e4m3, with and without scales by turns."""
    kinds = ("fp8", "fp8-scaled")
    return [replace(case, kv=kinds[index % 2]) for index, case in enumerate(cases)]


@dataclass(frozen=True, slots=True)
class Paged:
    """A cache with random keys and values, and the rows that lie in it."""

    cache: Tensor  # [num_blocks, Hkv, 2, block_size, D]
    block_table: Tensor  # int32 [R, B]
    seq_lens: Tensor  # int32 [R]


SMALL_DECODE = [
    AttentionCase("gqa3", 6, 2, 32, (1, 16, 40, 0, 100, 17)),
    AttentionCase("one-row", 4, 1, 16, (150,)),
    AttentionCase("mha-odd-dim", 2, 2, 24, (33, 0, 64)),
    AttentionCase("window-softcap", 4, 2, 16, (90, 5, 31, 32, 33), window=20, softcap=30.0),
    AttentionCase("empty-rows", 2, 1, 16, (0, 0, 50, 0, 0, 7, 0)),
    AttentionCase("sinks", 6, 2, 16, (90, 5, 31), window=40, sinks=True),
    AttentionCase("block-32", 4, 2, 16, (70, 31), block_size=32),
    AttentionCase("chunks", 4, 2, 16, (90, 5, 72, 0, 73, 24, 25), window=-24),
]
SMALL_PREFILL = [
    AttentionCase("prompts", 6, 2, 32, (40, 1, 17), (40, 1, 17)),
    AttentionCase("prefixes", 4, 1, 16, (90, 33, 64), (10, 33, 20)),
    AttentionCase("window", 4, 2, 16, (100, 30, 70), (60, 30, 5), window=24),
    AttentionCase("odd-dim-softcap", 2, 2, 24, (50,), (21,), softcap=20.0),
    AttentionCase("empty-rows", 2, 1, 16, (0, 20, 0, 35), (0, 20, 0, 30)),
    AttentionCase("sinks", 4, 2, 16, (60, 30), (21, 30), window=24, sinks=True),
    AttentionCase("block-32", 4, 2, 16, (70, 31), (40, 31), block_size=32),
    AttentionCase("chunks", 4, 2, 16, (100, 30, 72, 73), (60, 30, 5, 1), window=-24),
]

_MIXED = (1, 15, 16, 17, 0, 255, 256, 300, 1000, 63, 64, 65)
GPU_DECODE = [
    AttentionCase("smollm2-mixed", 9, 3, 64, _MIXED),
    AttentionCase("smollm2-batch-1", 9, 3, 64, (700,)),
    AttentionCase("smollm2-batch-256", 9, 3, 64, tuple(1 + 7 * i % 900 for i in range(256))),
    AttentionCase("gemma-full", 4, 1, 256, _MIXED),
    AttentionCase("gemma-window", 4, 1, 256, (*_MIXED, 2000), window=512),
    AttentionCase("qwen3-mixed", 16, 8, 128, _MIXED),
    AttentionCase("gemma-few", 4, 1, 256, (1, 300, 0, 2000, 17), window=512),
    AttentionCase("qwen3-few", 16, 8, 128, (1, 15, 0, 1000, 64, 65, 300, 32)),
    AttentionCase("llama8b-one-long", 32, 8, 128, (40_000,)),
    AttentionCase("llama8b-long-and-short", 32, 8, 128, (20_000, *(3,) * 31)),
    AttentionCase("llama8b-batch-300", 32, 8, 128, tuple(1 + 13 * i % 400 for i in range(300))),
    AttentionCase("phi-dim-80", 8, 8, 80, _MIXED),
    AttentionCase("dim-96-softcap", 12, 4, 96, _MIXED, softcap=50.0),
    AttentionCase("gqa-16", 16, 1, 128, _MIXED),
    AttentionCase("llama4-chunks", 40, 8, 128, (*_MIXED, 2000), window=-512),
    AttentionCase("gqa-7-window-block-32", 14, 2, 64, _MIXED, window=100, block_size=32),
    AttentionCase("all-empty", 9, 3, 64, (0, 0, 0)),
]
_CHUNKS = ((300, 1000, 17, 0, 64, 4096, 1, 129), (300, 200, 17, 0, 3, 512, 1, 128))
GPU_PREFILL = [
    AttentionCase("smollm2", 9, 3, 64, *_CHUNKS),
    AttentionCase("gemma-full", 4, 1, 256, *_CHUNKS),
    AttentionCase("gemma-window", 4, 1, 256, *_CHUNKS, window=512),
    AttentionCase("qwen3", 16, 8, 128, *_CHUNKS),
    AttentionCase("llama8b", 32, 8, 128, (2048, 700), (2048, 700)),
    AttentionCase("dim-80", 8, 8, 80, *_CHUNKS),
    AttentionCase("llama4-chunks", 40, 8, 128, *_CHUNKS, window=-500),
    AttentionCase("dim-96-softcap", 12, 4, 96, *_CHUNKS, softcap=50.0),
    AttentionCase("gqa-16-small-window", 16, 1, 128, *_CHUNKS, window=33),
    AttentionCase("block-32", 14, 2, 64, *_CHUNKS, window=100, block_size=32),
    AttentionCase("many-rows", 9, 3, 64, (20,) * 300, tuple(1 + i % 20 for i in range(300))),
]


def paged(
    case: AttentionCase,
    dtype: torch.dtype,
    device: str,
    *,
    stale: float = 1e3,
    seed: int = 0,
) -> Paged:
    """Return the rows of *case* in shuffled blocks; what no row may see holds *stale*.

    Blocks wholly behind the window stand in the table as the null block.
    """
    generator = torch.Generator().manual_seed(seed)
    size = case.block_size
    counts = [-(-length // size) for length in case.lengths]
    num_blocks = 1 + sum(counts) + 3
    shape = (num_blocks, case.num_kv_heads, 2, size, case.head_dim)
    cache = torch.full(shape, stale, dtype=dtype, device=device)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros((len(counts), max(*counts, 1) + 2), dtype=torch.int32)
    queries = case.queries or (1,) * len(counts)
    for row, (length, count) in enumerate(zip(case.lengths, queries, strict=True)):
        content = torch.Generator().manual_seed(1000 * seed + row)
        first = max(0, first_seen(length - count, case.window))
        for index in range(first // size, counts[row]):
            block = order.pop()
            table[row, index] = block
            low, high = max(first - index * size, 0), min(length - index * size, size)
            part = torch.randn((*shape[1:3], high - low, case.head_dim), generator=content)
            cache[block, :, :, low:high] = part.to(device, dtype)
    if case.kv:
        from zlm.kernels.kv_fp8 import rounded

        scales = case.kv_scales(device)
        cache = rounded(cache.float() if scales is None else cache / scales.t()[..., None, None])
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return Paged(cache, table.to(device), lengths.to(device))


def queries(case: AttentionCase, dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    """Return q [T, Hq, D] as it stands in the merged QKV rows: a strided view."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(case.queries) if case.queries else len(case.lengths)
    heads = case.num_heads + 2 * case.num_kv_heads
    rows = torch.randn((tokens, heads, case.head_dim), generator=generator)
    return rows.to(device, dtype)[:, : case.num_heads]


def query_starts(case: AttentionCase, device: str) -> Tensor:
    """Return int32 [R + 1]: offsets of the rows among the tokens."""
    return torch.tensor([0, *case.queries]).cumsum(0).int().to(device)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ‖out - expected‖ / ‖expected‖; infinity if out has a NaN."""
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float("inf") if bool(error.isnan()) else error.item()


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def decode_both(
    case: AttentionCase,
    dtype: torch.dtype,
    device: str,
    *,
    processors: int | None = None,
    use_dot: bool | None = None,
    tile: int = 0,
    least: int = 1,
    workspace: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return (kernel's result, reference) of decode attention; what may not be read is NaN.

    The kernel is run twice over the same buffers, which must be ready for the second time. They are
    *workspace*, or made by what else is given.
    """
    from zlm.kernels import attention_decode as decode, attention_decode_plan as planning

    rows = paged(case, dtype, device, stale=float("nan"))
    q = queries(case, dtype, device)
    num_rows = len(case.lengths)
    workspace = workspace or planning.allocate_workspace(
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        dtype,
        torch.device(device),
        cache_dtype=case.cache_dtype(dtype),
        processors=processors,
        use_dot=use_dot,
        configs=(planning.DecodeConfig(tile, 4, 1, 1, least),) * 2 if tile else None,
    )
    workspace.partial.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    plan = torch.full((planning.plan_size(num_rows + 1, workspace),), -9, device=device).int()
    planning.plan_decode(
        rows.seq_lens,
        out=plan,
        workspace=workspace,
        num_kv_heads=case.num_kv_heads,
        window=case.window,
    )
    shape = (num_rows, case.num_heads, case.head_dim)
    where = (q, rows.cache, rows.block_table, rows.seq_lens)
    how = case.how(device)
    out, again = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    decode.attention_decode(*where, plan, out=out, workspace=workspace, **how)
    decode.attention_decode(*where, plan, out=again, workspace=workspace, **how)
    assert torch.equal(out, again), "the order of additions is fixed"
    assert not workspace.arrivals.any(), "counters are left at zero"
    return out, decode.reference(*where, **how)


def prefill_both(
    case: AttentionCase,
    dtype: torch.dtype,
    device: str,
    *,
    rotated: int = 0,
    room: int = 0,
    least: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return (kernel's result, reference) of prefill attention.

    With *rotated* the kernel is given queries of which so many elements are still to be turned.
    With *room* keys and values of rows of *least* tokens, up to so many blocks, are widened before.
    """
    from zlm.kernels import attention_prefill as prefill, attention_prefill_plan as tiling

    rows = paged(case, dtype, device)
    q, starts = queries(case, dtype, device), query_starts(case, device)
    per_tile = tiling.tile_queries(
        case.num_heads, case.num_kv_heads, case.head_dim, dtype, torch.device(device)
    )
    items = tiling.num_tiles(len(q), len(case.lengths), per_tile)
    plan = torch.full((items, 2), -9, dtype=torch.int32, device=device)
    tiling.plan_prefill(starts, rows.seq_lens, out=plan, queries=per_tile, window=case.window)
    shape = (len(q), case.num_heads, case.head_dim)
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    where = (q, rows.cache, rows.block_table, starts, rows.seq_lens)
    how = case.how(device)
    turns = None
    if rotated:
        generator = torch.Generator().manual_seed(5)
        angles = torch.rand((max(case.lengths), rotated // 2), generator=generator).to(device)
        turns = torch.polar(torch.ones_like(angles), angles)
    given: dict[str, Any] = {}
    if room:
        given["bases"], widened = widened_rows(case, rows, starts, room, least)
        prefill.attention_prefill(
            *where, plan, out=out, turns=turns, widened=widened, **given, **how
        )
        untouched = given["bases"].repeat_interleave(starts.diff()) < 0
        assert bool(out[untouched].isnan().all()), "rows that are not widened are not its business"
    prefill.attention_prefill(*where, plan, out=out, turns=turns, **given, **how)
    if turns is not None:
        pairs = zip(case.lengths, case.queries, strict=True)
        positions = torch.cat([torch.arange(length - n, length) for length, n in pairs])
        heads = q[..., :rotated].double().unflatten(-1, (-1, 2)).contiguous()
        heads = torch.view_as_complex(heads) * turns[positions.to(device)].unsqueeze(1)
        heads = torch.view_as_real(heads).flatten(-2)
        where = (torch.cat((heads.to(dtype), q[..., rotated:]), -1), *where[1:])
    return out, prefill.reference(*where, **how)


def widened_rows(
    case: AttentionCase, rows: Paged, starts: Tensor, room: int, least: int
) -> tuple[Tensor, Tensor]:
    """Return (bases, blocks) of *rows* widened as a plan says; blocks without a source are zero."""
    from zlm.kernels import kv_widen

    device = rows.cache.device
    bases, sources, count = (
        torch.full((n,), -9, dtype=torch.int32, device=device) for n in (len(case.lengths), room, 1)
    )
    kv_widen.plan_widening(
        rows.block_table,
        starts,
        rows.seq_lens,
        bases=bases,
        sources=sources,
        count=count,
        least=least,
        block_size=case.block_size,
        window=case.window,
    )
    out = torch.zeros((room, *rows.cache.shape[1:]), dtype=torch.float16, device=device)
    kv_widen.widen(rows.cache, sources, count, out=out)
    return bases, out


@dataclass(frozen=True, slots=True)
class RotaryCase:
    """A geometry for ``rotary_kv``; the last two of its tokens are padding."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated: int
    tokens: int
    qk_norm: bool = False
    value_norm: bool = False
    fp8: bool = False  # the cache is e4m3, with a scale for each head
    turns: bool = True  # or q alone is multiplied with a number

    def __str__(self) -> str:
        return self.name


ROTARY_SMALL = [
    RotaryCase("plain", 3, 1, 16, 16, 5),
    RotaryCase("qk-norm", 4, 2, 16, 16, 4, qk_norm=True),
    RotaryCase("partial", 2, 2, 24, 12, 4),
    RotaryCase("value-norm", 4, 1, 16, 16, 4, qk_norm=True, value_norm=True),
    RotaryCase("one-token-many-heads", 20, 4, 16, 16, 3, qk_norm=True),
    RotaryCase("fp8", 4, 2, 16, 16, 4, qk_norm=True, fp8=True),
    RotaryCase("temperature", 4, 2, 24, 24, 4, turns=False),
]
ROTARY_GPU = [
    RotaryCase("smollm2-batch-1", 9, 3, 64, 64, 3),
    RotaryCase("smollm2-prefill", 9, 3, 64, 64, 1000),
    RotaryCase("gemma", 4, 1, 256, 256, 66, qk_norm=True),
    RotaryCase("qwen3", 16, 8, 128, 128, 258, qk_norm=True),
    RotaryCase("llama8b", 32, 8, 128, 128, 258),
    RotaryCase("phi-partial-80", 8, 8, 80, 32, 50),
    RotaryCase("dim-96", 12, 4, 96, 96, 50, qk_norm=True),
    RotaryCase("llama4-temperature", 40, 8, 128, 128, 66, turns=False),
    RotaryCase("llama8b-fp8", 32, 8, 128, 128, 258, fp8=True),
    RotaryCase("gemma-fp8", 4, 1, 256, 256, 66, qk_norm=True, fp8=True),
]


def rotary_both(
    case: RotaryCase, dtype: torch.dtype, device: str, *, in_place: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (q, cache) of the kernel and of the reference; the cache held 7 before."""
    from zlm.kernels import rotary_kv as rotary

    generator = torch.Generator().manual_seed(0)
    heads, size, positions_known = case.num_heads + 2 * case.num_kv_heads, 16, 300
    qkv = torch.randn((case.tokens, heads * case.head_dim), generator=generator)
    qkv = qkv.to(device, dtype)
    positions = torch.randint(positions_known, (case.tokens,), generator=generator)
    slots = torch.randperm(2 * case.tokens, generator=generator)[: case.tokens] + size
    slots[-2:] = torch.tensor([-1, 3])
    angles = torch.rand((positions_known, case.rotated // 2), generator=generator) * 100
    table = torch.polar(torch.full_like(angles, 1.2), angles).to(device)
    if not case.turns:
        table = angles[:, 0].contiguous().to(device)[:, None].expand(-1, case.rotated // 2)
    num_blocks = 2 + (2 * case.tokens) // size + 1
    shape = (num_blocks, case.num_kv_heads, 2, size, case.head_dim)
    cache = torch.full(shape, 7.0, dtype=dtype, device=device)
    weights: dict[str, Any] = {}
    if case.qk_norm:
        for name in ("q_weight", "k_weight"):
            weights[name] = torch.randn(case.head_dim, generator=generator).to(device)
    if case.value_norm:
        weights["value_norm"] = True
    if case.fp8:
        cache = cache.to(torch.float8_e4m3fn)
        scales = torch.linspace(0.01, 0.03, 2 * case.num_kv_heads, device=device)
        weights["kv_scales"] = scales.view(2, case.num_kv_heads)
    where = (positions.to(device), slots.to(device), table)
    expected = rotary.reference(qkv, *where, cache, num_heads=case.num_heads, **weights)
    q_out = torch.full(
        (case.tokens, case.num_heads, case.head_dim), float("nan"), dtype=dtype, device=device
    )
    if in_place:
        width = case.num_heads * case.head_dim
        q_out = qkv[:, :width].unflatten(1, (case.num_heads, case.head_dim))
    rotary.rotary_kv(qkv, *where, cache, q_out=q_out, **weights)
    if case.fp8:  # that numbers are rounded right is seen elsewhere: to the bit, for all of them
        return (q_out, cache.float()), (expected[0], expected[1].float())
    return (q_out, cache), expected
