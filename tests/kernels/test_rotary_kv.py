"""Norm of q and k, rotation and cache write in Triton's interpreter, against the reference."""

import pytest
import torch
import triton_interpreter
from kernel_cases_attention import (
    ROTARY_SMALL,
    TOLERANCE,
    RotaryCase,
    relative_error,
    rotary_both,
)

triton_interpreter.enable()

from zlm.kernels import rotary_kv as rotary  # noqa: E402


@pytest.mark.parametrize("case", ROTARY_SMALL, ids=str)
def test_rotary_kv(case: RotaryCase) -> None:
    (q, cache), (expected_q, expected_cache) = rotary_both(case, torch.float32, "cpu")
    assert relative_error(q, expected_q) < TOLERANCE[torch.float32]
    assert relative_error(cache, expected_cache) < (0.01 if case.fp8 else TOLERANCE[torch.float32])
    assert torch.equal(cache == 7.0, expected_cache == 7.0), "only the slots are written"


def test_pairs_side_by_side_turn_counterclockwise() -> None:
    """A quarter turn takes the pair (a, b) to (-b, a); what does not turn stays."""
    qkv = torch.arange(1.0, 25.0).view(1, 24)  # one q, k and v head of 8
    table = torch.tensor([[1.0, 1.0], [1j, 1.0]], dtype=torch.complex64)
    cache = torch.zeros((2, 1, 2, 16, 8))
    q_out = torch.empty((1, 1, 8))
    rotary.rotary_kv(qkv, torch.tensor([1]), torch.tensor([16]), table, cache, q_out=q_out)
    assert q_out.flatten().tolist() == [-2, 1, 3, 4, 5, 6, 7, 8]
    assert cache[1, 0, 0, 0].tolist() == [-10, 9, 11, 12, 13, 14, 15, 16]
    assert cache[1, 0, 1, 0].tolist() == list(range(17, 25))


def test_queries_in_place() -> None:
    case = ROTARY_SMALL[0]
    (separate, _), _ = rotary_both(case, torch.float32, "cpu")
    (in_place, _), _ = rotary_both(case, torch.float32, "cpu", in_place=True)
    assert torch.equal(separate, in_place)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_finite_is_stored_as_zero() -> None:
    qkv = torch.ones((1, 3 * 16), dtype=torch.float16)
    qkv[0, 16], qkv[0, 33], qkv[0, 34] = float("nan"), float("inf"), float("-inf")
    table = torch.ones((4, 8), dtype=torch.complex64)
    cache = torch.full((2, 1, 2, 16, 16), 7.0, dtype=torch.float16)
    q_out = torch.empty((1, 1, 16), dtype=torch.float16)
    slots = torch.tensor([16 + 5])
    rotary.rotary_kv(qkv, torch.tensor([1]), slots, table, cache, q_out=q_out)
    stored = cache[1, 0, :, 5]
    assert bool(stored.isfinite().all())
    assert stored[1, :4].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert stored[0, 0] == 0.0 and stored[0, 4] == 1.0
    assert bool((cache[1, 0, :, :5] == 7.0).all()) and bool((cache[0] == 7.0).all())


@pytest.mark.parametrize("first", [0, 2, 5])
def test_queries_of_the_first_tokens(first: int) -> None:
    """Those of the others stay; keys and values of all are stored."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn((5, 6 * 16), generator=generator)
    table = torch.polar(torch.ones(9, 8), torch.rand((9, 8), generator=generator))
    where = torch.arange(5), torch.arange(16, 21), table
    results = []
    for turned_queries in (None, first):
        rows, cache = qkv.clone(), torch.full((3, 2, 2, 16, 16), 7.0)
        q = rows[:, :32].view(5, 2, 16)
        rotary.rotary_kv(rows, *where, cache, q_out=q, turned_queries=turned_queries)
        results.append((rows, cache))
    (whole, cache), (part, part_cache) = results
    assert torch.equal(cache, part_cache)
    assert torch.equal(part[:first], whole[:first]) and torch.equal(part[first:], qkv[first:])


def test_queries_alone() -> None:
    """Rows without keys and values: queries are as in whole rows, and nothing is stored."""
    case = ROTARY_SMALL[1]
    generator = torch.Generator().manual_seed(1)
    heads = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.randn((3, heads * case.head_dim), generator=generator)
    weight = torch.randn(case.head_dim, generator=generator)
    table = torch.polar(torch.ones(9, 8), torch.rand((9, 8), generator=generator))
    where = torch.tensor([0, 8, 3]), torch.tensor([16, 17, 18]), table
    shape = (3, case.num_kv_heads, 2, 16, case.head_dim)
    results = []
    for rows, rest in (
        (qkv, {"k_weight": weight}),
        (qkv[:, : case.num_heads * case.head_dim].contiguous(), {"reads_only": True}),
    ):
        q_out, cache = torch.empty((3, case.num_heads, case.head_dim)), torch.full(shape, 7.0)
        rotary.rotary_kv(rows, *where, cache, q_out=q_out, q_weight=weight, **rest)
        results.append((q_out, cache))
    assert torch.equal(results[0][0], results[1][0])
    assert (results[1][1] == 7.0).all() and not (results[0][1] == 7.0).all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_every_number_is_rounded_to_e4m3_as_torch_rounds_it() -> None:
    """Every 4th of float16: between two of e4m3, halfway, subnormal, too large, not finite."""
    bits = torch.arange(0, 2**16, 4, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.float16).float()
    qkv = torch.zeros((numbers.numel() // 512, 3 * 512))
    qkv[:, 512:1024], qkv[:, 1024:] = numbers.view(-1, 512), -numbers.view(-1, 512)
    table = torch.ones((1, 256), dtype=torch.complex64)
    cache = torch.zeros((3, 1, 2, 16, 512), dtype=torch.float8_e4m3fn)
    tokens, q_out = qkv.shape[0], torch.empty((qkv.shape[0], 1, 512))
    slots = torch.arange(tokens) + 16
    rotary.rotary_kv(qkv, torch.zeros(tokens).long(), slots, table, cache, q_out=q_out)
    finite = torch.where(numbers.isfinite(), numbers, 0.0).clamp(-448, 448)
    for kind, sign in ((0, 1), (1, -1)):
        stored = cache[1:, 0, kind].flatten()
        assert torch.equal(stored.float(), (sign * finite).to(torch.float8_e4m3fn).float())
