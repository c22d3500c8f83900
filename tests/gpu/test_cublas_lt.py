"""Products by chosen candidates of cuBLASLt against float64: alone, added, gated, in a graph."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases_gemm import relative_error
from torch import Tensor

from zlm.ops import cublas_lt
from zlm.ops.cublas_lt import CHOICES, Choice, Tuned

CUDA = "cuda"
TOLERANCE = 4e-3
PRODUCTS = sorted(
    {
        (rows, outputs, columns)
        for shapes in CHOICES.values()
        for (outputs, columns), uses in shapes.items()
        for covered, _ in uses
        for rows in (covered[0], covered[-1], 8192)
    }
)


def _operands(rows: int, outputs: int, columns: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator(CUDA).manual_seed(7)
    x = torch.randn(rows, columns, generator=random, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(outputs, columns, generator=random, device=CUDA, dtype=torch.bfloat16)
    return x, weight * 0.02


@pytest.mark.parametrize(("rows", "outputs", "columns"), PRODUCTS)
def test_products(rows: int, outputs: int, columns: int) -> None:
    from zlm.ops.gpu_linear import GpuProduct

    x, weight = _operands(rows, outputs, columns)
    product = GpuProduct(weight, None, torch.bfloat16, pdl=False)
    expected = x.double() @ weight.double().t()
    assert relative_error(product(x), expected) < TOLERANCE
    residual = torch.randn(rows, outputs, device=CUDA, dtype=torch.bfloat16)
    expected += residual.double()
    assert relative_error(product.add(x, residual), expected) < TOLERANCE


@pytest.mark.parametrize("outputs", [6144, 28672])
def test_the_candidates_of_a_long_prefill_are_there(outputs: int) -> None:
    if torch.cuda.get_device_name() not in CHOICES:
        pytest.skip("no choice was measured on this card")
    x, weight = _operands(8192, outputs, 4096)
    launch = Tuned(weight).find(x)
    assert launch is not None
    out = torch.empty(8192, outputs, device=CUDA, dtype=torch.bfloat16)
    launch(weight, x, out)
    assert relative_error(out, x.double() @ weight.double().t()) < TOLERANCE


def test_a_gated_product() -> None:
    from zlm.ops.gpu_linear import GpuGatedProduct

    x, weight = _operands(8192, 28672, 4096)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    gated = GpuGatedProduct(weight, None, "silu", pdl=False)
    assert relative_error(gated(x), F.silu(gate) * up) < 2 * TOLERANCE


def test_what_is_not_there_is_torchs() -> None:
    none = Choice(tile=1, custom=99, cluster=0)
    assert cublas_lt._prepared(8192, 6144, 4096, none) is None
    x, weight = _operands(8192, 6144, 4096)
    assert Tuned(weight).find(x.float()) is None
    assert Tuned(weight).find(x.t().contiguous().t()) is None
    assert Tuned(weight.float()).find(x.float()) is None


def test_in_a_graph() -> None:
    from zlm.ops.gpu_linear import GpuProduct

    x, weight = _operands(8192, 6144, 4096)
    product = GpuProduct(weight, None, torch.bfloat16, pdl=False)
    expected = product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
