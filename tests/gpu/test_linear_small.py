"""Small-M products at real shapes on the GPU, against the float64 reference."""

import pytest
import torch
from kernel_cases_gemm import REAL, GemmCase, operands, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[1])


def check(case: GemmCase, dtype: torch.dtype, **keywords) -> None:
    from zlm.kernels import linear_small

    arguments = operands(case, dtype, "cuda", residual_dtype=keywords.pop("residual_dtype", None))
    out_dtype = dtype if arguments["residual"] is None else arguments["residual"].dtype
    out = torch.full((case.rows, case.N), float("nan"), dtype=out_dtype, device="cuda")
    linear_small.linear(**arguments, out=out, **keywords)
    assert relative_error(out, linear_small.reference(**arguments)) < TOLERANCE[dtype]


@TYPES
@pytest.mark.parametrize("case", REAL, ids=str)
def test_product(case: GemmCase, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("rows", [1, 4, 8, 64])
def test_a_float32_residual_beside_float16_weights(rows: int) -> None:
    case = GemmCase(rows, 640, 2048, norm=True, residual=True)
    check(case, torch.float16, residual_dtype=torch.float32)


@pytest.mark.parametrize("rows", [1, 4, 8, 64])
def test_a_float32_output_of_bfloat16_weights(rows: int) -> None:
    from zlm.kernels import linear_small

    arguments = operands(GemmCase(rows, 49152, 576), torch.bfloat16, "cuda")
    out = torch.full((rows, 49152), float("nan"), device="cuda")
    linear_small.linear(**arguments, out=out)
    assert relative_error(out, linear_small.reference(**arguments)) < 1e-5


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="programmatic dependent launch needs compute capability 9.0",
)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_chain_of_dependent_launches_in_a_graph(rows: int) -> None:
    """Each product reads what the one before it wrote; a missing wait gives a moving error."""
    from zlm.kernels import linear_small

    first = operands(GemmCase(rows, 576, 1536, norm=True), torch.float32, "cuda")
    second = operands(GemmCase(rows, 1536, 576, norm=True), torch.float32, "cuda", seed=1)
    x = first["x"].contiguous()
    wanted = x.double()
    for arguments in (first, second) * 4:
        wanted = linear_small.reference(**{**arguments, "x": wanted.float()})
    a, b = torch.empty(rows, 576, device="cuda"), torch.empty(rows, 1536, device="cuda")

    def chain() -> None:
        source = x
        for arguments, out in ((first, a), (second, b)) * 4:
            linear_small.linear(**{**arguments, "x": source}, out=out, pdl=True)
            source = out

    chain()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        b.fill_(float("nan"))
        graph.replay()
        assert relative_error(b, wanted) < 1e-4
