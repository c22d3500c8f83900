"""The arithmetic of the KV cache's size."""

import pytest
from hypothesis import given, strategies as st

from zlm.errors import ConfigError
from zlm.worker.memory_plan import Demand, GroupFacts, blocks_of_sequence, plan

GIB = 2**30
FULL, SLIDING = GroupFacts(0, 48 * 1024), GroupFacts(512, 240 * 1024)
DEMAND = Demand(block_size_tokens=16, max_model_len=8192, max_num_seqs=64, step_tokens=512)


def test_default_is_a_gibibyte() -> None:
    made = plan([FULL], DEMAND, free_bytes=16 * GIB)
    assert GIB - FULL.block_bytes < made.total_bytes <= GIB
    assert made.totals == [made.num_blocks[0] + 1]


def test_default_grows_to_hold_one_sequence() -> None:
    demand = Demand(16, 10**6, 4, 512)
    made = plan([FULL], demand, free_bytes=16 * GIB)
    assert made.num_blocks == (10**6 // 16,)


def test_default_does_not_outgrow_what_can_be_used() -> None:
    tiny = Demand(block_size_tokens=16, max_model_len=128, max_num_seqs=4, step_tokens=64)
    assert plan([FULL], tiny, free_bytes=16 * GIB).num_blocks == (2 * 4 * 8,)


def test_a_budget_of_ones_own_is_used_up() -> None:
    made = plan([FULL], DEMAND, free_bytes=16 * GIB, kv_cache_memory_bytes=2 * GIB)
    assert 2 * GIB - FULL.block_bytes < made.total_bytes <= 2 * GIB


def test_too_little_memory_names_flags_and_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 8192.*0\.02 GiB.*lower") as caught:
        plan([FULL], DEMAND, free_bytes=30 * 2**20)
    assert "--kv-cache-memory-bytes" in caught.value.message
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 1000 .*--max-model-len 8192"):
        plan([FULL], DEMAND, free_bytes=GIB, kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match="are free"):
        plan([FULL], DEMAND, free_bytes=GIB, kv_cache_memory_bytes=2 * GIB)


def test_the_budget_named_in_the_error_is_enough() -> None:
    with pytest.raises(ConfigError) as caught:
        plan([FULL, SLIDING], DEMAND, free_bytes=30 * 2**20)
    least = int(caught.value.message.rsplit(" ", 1)[1])
    made = plan([FULL, SLIDING], DEMAND, free_bytes=GIB, kv_cache_memory_bytes=least)
    assert made.total_bytes == least
    with pytest.raises(ConfigError):
        plan([FULL, SLIDING], DEMAND, free_bytes=GIB, kv_cache_memory_bytes=least - 1)


def test_override_is_taken_as_it_is() -> None:
    made = plan([FULL, SLIDING], DEMAND, free_bytes=0, num_blocks_override=16)
    assert made.num_blocks == (15, 15) and made.totals == [16, 16]
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override 1"):
        plan([FULL], DEMAND, free_bytes=GIB, num_blocks_override=1)


def test_a_sliding_group_needs_its_window_only() -> None:
    assert blocks_of_sequence(FULL, DEMAND) == 512
    assert blocks_of_sequence(SLIDING, DEMAND) == (512 + 512) // 16 + 2
    short = Demand(16, 256, 4, 512)
    assert blocks_of_sequence(SLIDING, short) == 16


def test_table_has_a_line_a_group_and_a_total() -> None:
    made = plan([FULL, SLIDING], DEMAND, free_bytes=16 * GIB)
    lines = made.table()
    assert [line.split()[0] for line in lines] == ["KV", "full", "window", "total"]
    assert "16384.0 MiB free" in lines[-1]


@given(
    windows=st.lists(
        st.sampled_from([0, 64, 512, 4096, -512]), min_size=1, max_size=3, unique=True
    ),
    sizes=st.lists(st.integers(256, 2**20), min_size=3, max_size=3),
    demand=st.builds(
        Demand,
        block_size_tokens=st.sampled_from([8, 16, 32]),
        max_model_len=st.integers(16, 40_000),
        max_num_seqs=st.integers(1, 256),
        step_tokens=st.integers(1, 4096),
    ),
    free=st.integers(0, 64 * GIB),
    given_bytes=st.none() | st.integers(0, 64 * GIB),
)
def test_any_plan_fits_and_holds_one_sequence(
    windows: list[int], sizes: list[int], demand: Demand, free: int, given_bytes: int | None
) -> None:
    groups = [GroupFacts(w, s) for w, s in zip(windows, sizes, strict=False)]
    needs = [blocks_of_sequence(group, demand) for group in groups]
    least = sum((n + 1) * g.block_bytes for n, g in zip(needs, groups, strict=True))
    limit = free // 2 if given_bytes is None else given_bytes
    try:
        made = plan(groups, demand, free_bytes=free, kv_cache_memory_bytes=given_bytes)
    except ConfigError:
        assert least > limit or limit > free
        return
    assert made.total_bytes <= limit
    full = [n for n, g in zip(made.num_blocks, groups, strict=True) if not g.window_tokens]
    for count, need, group in zip(made.num_blocks, needs, groups, strict=True):
        assert count >= need
        if group.window_tokens:
            assert count <= max(need * demand.max_num_seqs, need)
            assert not full or count <= max(full[0], need)
