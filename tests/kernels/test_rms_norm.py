"""RMSNorm with residual and inner norm in Triton's interpreter, against the float64 reference."""

import pytest
import torch
import triton_interpreter
from kernel_cases_attention import TOLERANCE, relative_error

triton_interpreter.enable()

from zlm.kernels import rms_norm as norm  # noqa: E402

EPS = 1e-5


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [48, 64, 100])
@pytest.mark.parametrize("inner", [False, True], ids=["", "inner"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_rms_norm(width: int, inner: bool, residual: bool) -> None:
    x, weight = random(3, width, seed=0) * 3, random(width, seed=1)
    old = random(3, width, seed=2) if residual else None
    inner_weight = random(width, seed=3) if inner else None
    expected, expected_sum = norm.reference(x, weight, EPS, old, inner_weight)
    out, new = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    norm.rms_norm(
        x,
        weight,
        EPS,
        out=out,
        residual=old,
        residual_out=new if residual else None,
        inner_weight=inner_weight,
    )
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    if residual:
        assert relative_error(new, expected_sum) < TOLERANCE[torch.float32]
    else:
        assert bool(new.isnan().all())


def test_in_place_and_strided() -> None:
    rows = random(4, 80, seed=4)
    x, residual = rows[:, :48], random(4, 48, seed=5)
    weight = random(48, seed=6)
    expected, expected_sum = norm.reference(x, weight, EPS, residual)
    rest = rows[:, 48:].clone()
    norm.rms_norm(x, weight, EPS, out=x, residual=residual, residual_out=residual)
    assert relative_error(x, expected) < TOLERANCE[torch.float32]
    assert relative_error(residual, expected_sum) < TOLERANCE[torch.float32]
    assert torch.equal(rows[:, 48:], rest)


def test_half_precision_with_a_wide_residual() -> None:
    """A sum beyond float16's range, as Gemma's residual has, comes out finite and right."""
    x, weight = (random(2, 64, seed=7) * 1e4).half(), random(64, seed=8)
    residual = random(2, 64, seed=9) * 1e5
    expected, expected_sum = norm.reference(x, weight, EPS, residual)
    out = torch.empty_like(x)
    norm.rms_norm(x, weight, EPS, out=out, residual=residual, residual_out=residual)
    assert relative_error(residual, expected_sum) < TOLERANCE[torch.float32]
    assert relative_error(out, expected) < TOLERANCE[torch.float16]
