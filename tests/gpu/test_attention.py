"""The compiled attention kernels on real shapes, against float64 references."""

import pytest
import torch
from kernel_cases_attention import (
    GPU_DECODE,
    GPU_PREFILL,
    TOLERANCE,
    AttentionCase,
    decode_both,
    in_fp8,
    paged,
    prefill_both,
    queries,
    query_starts,
    relative_error,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", GPU_DECODE, ids=str)
def test_decode(case: AttentionCase, dtype: torch.dtype) -> None:
    out, expected = decode_both(case, dtype, "cuda")
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name)
@pytest.mark.parametrize("case", GPU_DECODE[:6], ids=str)
def test_decode_without_dot(case: AttentionCase, dtype: torch.dtype) -> None:
    out, expected = decode_both(case, dtype, "cuda", use_dot=False)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", GPU_PREFILL, ids=str)
def test_prefill(case: AttentionCase, dtype: torch.dtype) -> None:
    out, expected = prefill_both(case, dtype, "cuda")
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", GPU_PREFILL[::2], ids=str)
def test_prefill_that_turns_its_queries(case: AttentionCase, dtype: torch.dtype) -> None:
    out, expected = prefill_both(case, dtype, "cuda", rotated=case.head_dim)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", in_fp8(GPU_DECODE), ids=str)
def test_decode_of_fp8(case: AttentionCase, dtype: torch.dtype) -> None:
    """Issue 6."""
    out, expected = decode_both(case, dtype, "cuda")
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", in_fp8(GPU_PREFILL), ids=str)
def test_prefill_of_fp8(case: AttentionCase, dtype: torch.dtype) -> None:
    """Issue 6."""
    out, expected = prefill_both(case, dtype, "cuda")
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("case", in_fp8(GPU_PREFILL), ids=str)
def test_prefill_of_widened_rows(case: AttentionCase, dtype: torch.dtype) -> None:
    """Issue 6: some rows widened, some not, for want of tokens or of room."""
    room = sum(-(-length // case.block_size) for length in case.lengths) * 3 // 4
    out, expected = prefill_both(case, dtype, "cuda", rotated=case.head_dim, room=room, least=4)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("case", in_fp8(GPU_DECODE[:6]), ids=str)
def test_fp8_as_cards_before_sm89_read_it(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zlm.kernels import kv_fp8

    monkeypatch.setattr(kv_fp8, "NATIVE_CAPABILITY", (99, 0))
    for use_dot, dtype in ((True, torch.bfloat16), (True, torch.float16), (False, torch.float16)):
        out, expected = decode_both(case, dtype, "cuda", use_dot=use_dot)
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
def test_one_graph_serves_all_lengths(pdl: bool) -> None:
    """Plan and decode captured once follow the lengths and tables that stand there at replay.

    Two decodes follow each other at once, over the same scratch: replays must agree to the bit.
    """
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    from zlm.kernels import attention_decode as decode, attention_decode_plan as planning

    dtype, device = torch.bfloat16, torch.device("cuda")
    steps = [(1,) * 8, (500, 0, 33, 64, 1, 0, 0, 900), (0,) * 8, (1000,) * 8, (7, *(0,) * 7)]
    cases = [AttentionCase(f"step-{i}", 9, 3, 64, step) for i, step in enumerate(steps)]
    rows = [paged(case, dtype, "cuda", seed=i) for i, case in enumerate(cases)]
    q = queries(cases[0], dtype, "cuda")
    most = max(each.cache.shape[0] for each in rows)
    cache = torch.zeros((most, *rows[0].cache.shape[1:]), dtype=dtype, device=device)
    width = max(each.block_table.shape[1] for each in rows)
    table = torch.zeros((8, width), dtype=torch.int32, device=device)
    lengths = torch.ones(8, dtype=torch.int32, device=device)
    workspace = planning.allocate_workspace(9, 3, 64, dtype, device)
    plan = torch.empty(planning.plan_size(8, workspace), dtype=torch.int32, device=device)
    first, out = (torch.empty((8, 9, 64), dtype=dtype, device=device) for _ in range(2))

    def step() -> None:
        planning.plan_decode(lengths, out=plan, workspace=workspace, num_kv_heads=3, pdl=pdl)
        for each in (first, out):
            decode.attention_decode(
                q, cache, table, lengths, plan, out=each, workspace=workspace, scale=0.125, pdl=pdl
            )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for each in rows:
        cache[: each.cache.shape[0]].copy_(each.cache)
        table[:, : each.block_table.shape[1]].copy_(each.block_table)
        lengths.copy_(each.seq_lens)
        out.fill_(float("nan"))
        graph.replay()
        expected = decode.reference(q, cache, table, lengths, scale=0.125)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        once = out.clone()
        for _ in range(50):
            graph.replay()
            assert torch.equal(first, once) and torch.equal(out, once)
        assert not workspace.arrivals.any(), "counters are left at zero"


def test_caches_beyond_32_bit_offsets() -> None:
    """Blocks past the 2^31st element are found by decode and prefill (a cache of 4.6 GB)."""
    from zlm.kernels import (
        attention_decode as decode,
        attention_decode_plan as planning,
        attention_prefill as prefill,
        attention_prefill_plan as tiling,
    )

    case = AttentionCase("far", 32, 8, 128, (100, 60), (40, 60))
    dtype, device = torch.bfloat16, torch.device("cuda")
    near = paged(case, dtype, "cuda")
    count = near.cache.shape[0]
    cache = torch.empty((70_000, *near.cache.shape[1:]), dtype=dtype, device=device)
    assert cache.numel() > 2**31
    cache[-count:].copy_(near.cache)
    table = near.block_table + (70_000 - count)
    q, starts = queries(case, dtype, "cuda"), query_starts(case, "cuda")
    per_tile = tiling.tile_queries(32, 8, 128, dtype, device)
    plan = torch.empty((tiling.num_tiles(100, 2, per_tile), 2), dtype=torch.int32, device=device)
    tiling.plan_prefill(starts, near.seq_lens, out=plan, queries=per_tile)
    out = torch.empty(q.shape, dtype=dtype, device=device)
    where = (q, cache, table, starts, near.seq_lens)
    prefill.attention_prefill(*where, plan, out=out, scale=case.scale)
    expected = prefill.reference(*where, scale=case.scale)
    assert relative_error(out, expected) < TOLERANCE[dtype]

    workspace = planning.allocate_workspace(32, 8, 128, dtype, device)
    work = torch.empty(planning.plan_size(2, workspace), dtype=torch.int32, device=device)
    planning.plan_decode(near.seq_lens, out=work, workspace=workspace, num_kv_heads=8)
    ends = torch.tensor([39, 99], device=device)
    last = torch.empty((2, 32, 128), dtype=dtype, device=device)
    decode.attention_decode(
        q[ends], cache, table, near.seq_lens, work, out=last, workspace=workspace, scale=case.scale
    )
    assert relative_error(last, expected[ends]) < TOLERANCE[dtype]
