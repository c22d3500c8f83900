"""The compiled RMSNorm and rotary kernels on real shapes, against float64 references."""

import pytest
import torch
from kernel_cases_attention import ROTARY_GPU, TOLERANCE, RotaryCase, relative_error, rotary_both

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTHS = [576, 640, 1024, 2560, 4096, 5120, 16_384]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    from zlm.kernels import rms_norm as norm

    x, weight = (random(rows, width, seed=0) * 4).to(dtype), random(width, seed=1)
    out = torch.full_like(x, float("nan"))
    norm.rms_norm(x, weight, 1e-5, out=out)
    assert relative_error(out, norm.reference(x, weight, 1e-5)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("inner", [False, True], ids=["add", "inner-norm-and-add"])
@pytest.mark.parametrize("wide", [False, True], ids=["residual-as-x", "residual-float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("width", WIDTHS[:5])
def test_rms_norm_with_residual(width: int, dtype: torch.dtype, wide: bool, inner: bool) -> None:
    from zlm.kernels import rms_norm as norm

    x, weight = random(65, width, seed=0).to(dtype), random(width, seed=1)
    residual = random(65, width, seed=2).to(torch.float32 if wide else dtype)
    inner_weight = random(width, seed=3) if inner else None
    expected, expected_sum = norm.reference(x, weight, 1e-6, residual, inner_weight)
    out = torch.full_like(x, float("nan"))
    sums = {"residual": residual, "residual_out": residual, "inner_weight": inner_weight}
    norm.rms_norm(x, weight, 1e-6, out=out, **sums)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(residual, expected_sum) < TOLERANCE[residual.dtype]


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in-place"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", ROTARY_GPU, ids=str)
def test_rotary_kv(case: RotaryCase, dtype: torch.dtype, in_place: bool) -> None:
    (q, cache), (expected_q, expected_cache) = rotary_both(case, dtype, "cuda", in_place=in_place)
    assert relative_error(q, expected_q) < TOLERANCE[dtype]
    assert relative_error(cache, expected_cache) < TOLERANCE[dtype]
    untouched = expected_cache == 7.0
    assert bool((cache[untouched] == 7.0).all()), "only the slots are written"


def test_what_is_not_finite_is_stored_as_zero() -> None:
    """Overflow of float16 included: a cache never holds what would poison a softmax."""
    from zlm.kernels import rotary_kv as rotary

    qkv = torch.full((4, 3 * 64), 60_000.0, dtype=torch.float16, device="cuda")
    qkv[0, 64:] = float("nan")
    qkv[1, 128:] = float("inf")
    angles = torch.rand((8, 32), device="cuda") * 6
    table = torch.polar(torch.full_like(angles, 2.0), angles)
    cache = torch.full((2, 1, 2, 16, 64), 7.0, dtype=torch.float16, device="cuda")
    positions = torch.arange(4, device="cuda")
    q_out = torch.empty((4, 1, 64), dtype=torch.float16, device="cuda")
    rotary.rotary_kv(qkv, positions, positions + 16, table, cache, q_out=q_out)
    assert bool(cache.isfinite().all())
    assert bool((cache[1, 0, :, 0] == 0).all()) and bool((cache[1, 0, 1, 1] == 0).all())
    assert bool((cache[1, 0, 1, 2:4] == 60_000.0).all())
