"""The GPU backend's products with quantized weights in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import triton_interpreter
from torch import Tensor

triton_interpreter.enable()

from zlm.kernels import quantized_codes  # noqa: E402
from zlm.kernels.moe import ExpertTensors  # noqa: E402
from zlm.kernels.quantized_moe import ExpertCodes  # noqa: E402

from zlm.ops import gpu_packing, gpu_quantized  # noqa: E402
from zlm.ops.backend import ExpertWeights, Mixture  # noqa: E402
from zlm.ops.block_matrix import BlockMatrix  # noqa: E402
from zlm.ops.cpu import CpuOps  # noqa: E402
from zlm.ops.gpu import GpuOps  # noqa: E402

CPU = torch.device("cpu")
KINDS = ("four", "four_zeros", "four_offsets", "bytes", "float8", "blocks", "ordered")


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.wide_programs(monkeypatch)


def matrix(kind: str, rows: int = 24, columns: int = 64) -> BlockMatrix:
    """Return a random weight."""
    torch.manual_seed(len(kind))
    scales = (torch.rand(rows, columns // 32) + 0.5) / 16
    if kind in ("float8", "blocks"):
        codes = (torch.randn(rows, columns) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
        if kind == "float8":
            return BlockMatrix(codes, torch.rand(rows, 1) / 50, None, (1, columns))
        shape = -(-rows // 16), columns // 32
        return BlockMatrix(codes, torch.rand(shape) / 50, None, (16, 32))
    if kind == "bytes":
        codes = torch.randint(0, 256, (rows, columns)).to(torch.uint8)
        return BlockMatrix(codes, scales, scales * -100, (1, 32))
    codes = torch.randint(0, 16, (rows, columns)).to(torch.uint8)
    if kind == "four_zeros":
        zeros = torch.randint(0, 16, scales.shape)
        return BlockMatrix(codes, scales, scales * -zeros, (1, 32))
    if kind == "four_offsets":
        return BlockMatrix(codes, scales, torch.randn(scales.shape), (1, 32))
    if kind == "float4":
        powers = torch.exp2(torch.randint(-6, -2, scales.shape).float())
        return BlockMatrix(codes, powers, None, (1, 32), floats=True)
    order = torch.randperm(columns) if kind == "ordered" else None
    return BlockMatrix(codes, scales, scales * -8, (1, 32), order)


def gpu_ops(**options: object) -> GpuOps:
    return GpuOps(CPU, torch.float32, **options)  # type: ignore[arg-type]


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-3) -> None:
    assert float((actual - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "fixed"])
def test_product(kind: str, rows: int, deterministic: bool) -> None:
    weight, x = matrix(kind), torch.randn(rows, 64)
    bias, residual = torch.randn(24), torch.randn(rows, 24)
    product = gpu_ops(deterministic=deterministic).linear(weight, bias)
    assert isinstance(product, gpu_quantized.QuantizedProduct)
    expected = x @ weight.dequantize(torch.float32).t() + bias
    close(product(x), expected)
    close(product.add(x, residual.clone()), residual + expected)


@pytest.mark.parametrize("kind", ["four_zeros", "float8", "ordered"])
@pytest.mark.parametrize("rows", [1, 3])
def test_gated(kind: str, rows: int) -> None:
    gate, x = matrix(kind), torch.randn(rows, 64)
    up = BlockMatrix(gate.codes, gate.scales * 2, gate.offsets, gate.block, gate.order)
    ops = gpu_ops()
    norm = ops.norm(torch.rand(64), 1e-6)
    both = ops.gated(gate, up, None, None, "silu")
    assert isinstance(both, gpu_quantized.QuantizedGated)
    wide = [w.dequantize(torch.float32).t() for w in (gate, up)]
    normed = norm(x)
    close(both(x, norm), torch.nn.functional.silu(normed @ wide[0]) * (normed @ wide[1]))


@pytest.mark.parametrize("kind", ["four_zeros", "four_offsets", "bytes", "ordered"])
def test_many_rows_go_by_the_form_beside_the_codes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same results as without it: the weight is rounded alike."""
    monkeypatch.setattr(gpu_quantized, "SPREAD_ROWS", 2)
    monkeypatch.setattr(gpu_quantized.quantized_linear, "MOST_ROWS", 2)
    weight, bias = matrix(kind), torch.randn(24).bfloat16()
    both, codes = (GpuOps(CPU, torch.bfloat16, spread=spread) for spread in (True, False))
    norm = both.norm(torch.rand(64), 1e-6)
    for rows in (2, 3):
        x, residual = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 24).bfloat16()
        with monkeypatch.context() as without:
            if rows > 2:  # the codes are not looked at
                without.setattr(gpu_quantized.QuantizedCore, "_few", None)
            product = both.linear(weight, bias)
            got = [product(x), product(x, norm), product.add(x, residual.clone())]
            got += [both.linear(weight, bias, wide=True)(x)]
            got += [both.gated(weight, weight, None, None, "silu")(x, norm)]
        product = codes.linear(weight, bias)
        expected = [product(x), product(x, norm), product.add(x, residual.clone())]
        expected += [codes.linear(weight, bias, wide=True)(x)]
        expected += [codes.gated(weight, weight, None, None, "silu")(x, norm)]
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == other.dtype
            close(one.float(), other.float(), 1e-2)  # the interpreter cuts off


@pytest.mark.parametrize("kind", ["float8", "four_zeros"])
def test_one_form_where_both_are_of_no_use(kind: str) -> None:
    """Rows are rounded to float8, have the same bits whatever the others, or are float32."""
    rounds = kind == "float8"
    fixed = GpuOps(CPU, torch.bfloat16, spread=True, deterministic=not rounds)
    for ops in (fixed, GpuOps(CPU, torch.float32, spread=True)):
        product = ops.linear(matrix(kind))
        assert isinstance(product, gpu_quantized.QuantizedProduct)
        assert product.core.spread is None


def test_float8_activations_are_rounded_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are for many rows in bfloat16. The interpreter cuts off what the card rounds."""
    monkeypatch.setattr(gpu_quantized, "FLOAT8_ROWS", 0)
    weight, x = matrix("float8"), torch.randn(5, 64).bfloat16()
    ops = GpuOps(CPU, torch.bfloat16)
    norm = ops.norm(torch.rand(64), 1e-6)
    product = ops.linear(weight)
    wide = weight.dequantize(torch.float32).t()
    close(product(x).float(), x.float() @ wide, 0.08)
    close(product(x, norm).float(), norm(x).float() @ wide, 0.08)
    residual = torch.randn(5, 24).bfloat16()
    close(product.add(x, residual.clone()).float(), residual + x.float() @ wide, 0.08)
    gated = ops.gated(weight, weight, None, None, "silu")
    out = x.float() @ wide
    close(gated(x).float(), torch.nn.functional.silu(out) * out, 0.15)


def test_float8_activations_are_rounded_by_the_checkpoints_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the CPU rounds them, and beyond its range they are cut off (issue 8)."""
    monkeypatch.setattr(gpu_quantized, "FLOAT8_ROWS", 0)
    first = replace(matrix("float8", rows=32), input_scale=1 / 448)  # rows are up to 1
    second = replace(matrix("float8", 24, 32), input_scale=0.5)
    x = torch.randn(5, 64).bfloat16() * 3
    results = []
    for ops in (GpuOps(CPU, torch.bfloat16), CpuOps(torch.bfloat16, quantized=True)):
        gated, down = ops.gated(first, first, None, None, "silu"), ops.linear(second)
        plain = ops.linear(first)(x)
        ops.join(gated, down)
        results.append((plain.float(), down(gated(x)).float()))
    cut = x.float().clamp(-1, 1) @ first.dequantize(torch.float32).t()
    for found, wanted in zip(*results, strict=True):
        close(found, wanted, 0.1)
    close(results[1][0], cut, 0.05)
    assert (results[0][0] - x.float() @ first.dequantize(torch.float32).t()).norm() > cut.norm()


def test_blocks_of_float8_have_activations_rounded_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_quantized, "FLOAT8_ROWS", 0)
    codes = torch.randn(256, 256).to(torch.float8_e4m3fn)
    first = BlockMatrix(codes, torch.rand(2, 2) / 16, None, (128, 128))
    x = torch.randn(3, 256).bfloat16()
    x[:, 128:] *= 100
    ops = GpuOps(CPU, torch.bfloat16)
    gated, down = ops.gated(first, first, None, None, "silu"), ops.linear(first)
    wide = first.dequantize(torch.float32).t()
    close(down(x).float(), x.float() @ wide, 0.08)
    both = x.float() @ wide
    between = torch.nn.functional.silu(both) * both
    close(gated(x).float(), between, 0.15)
    ops.join(gated, down)
    handed = gated(x)
    assert isinstance(handed, gpu_quantized.RoundedRows) and handed.scales.shape == (3, 2)
    close(down(handed).float(), between @ wide, 0.2)


@pytest.mark.parametrize("most", [0, 16], ids=["rounded", "few"])
def test_joined_products_of_float8(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_quantized, "FLOAT8_ROWS", most)
    first, second, x = matrix("float8", rows=32), matrix("float8", 24, 32), torch.randn(3, 64)
    ops = GpuOps(CPU, torch.bfloat16)
    gated, down = ops.gated(first, first, None, None, "silu"), ops.linear(second)
    wanted = down(gated(x.bfloat16())).float()
    ops.join(gated, down)
    between = gated(x.bfloat16())
    assert isinstance(between, gpu_quantized.RoundedRows) == (most == 0)
    close(down(between).float(), wanted, 0.1)
    residual = torch.randn(3, 24).bfloat16()
    close(down.add(between, residual.clone()).float(), residual + wanted, 0.1)


@pytest.mark.parametrize("kind", ["four_zeros", "float8", "float4"])
def test_experts(kind: str) -> None:
    """One whose weights are not all quantized, too."""
    mixture = Mixture(3, 2, normalize=True, activation="silu")
    made = ExpertWeights(matrix(kind, 32), matrix(kind, 32), matrix(kind, 64, 32))
    mixed = ExpertWeights(made.gate, torch.randn(32, 64) / 8, made.down)
    x, logits = torch.randn(4, 64), torch.randn(4, 3)
    for experts, form in ((made, ExpertCodes), (mixed, ExpertTensors)):
        results = []
        for ops in (CpuOps(torch.float32), gpu_ops()):
            product = ops.experts(mixture, ([experts] * 3).__getitem__)
            results.append(product(x, logits, torch.zeros(4, 64)))
        assert isinstance(product.weights, form)
        close(results[1], results[0])


def test_embedding_and_a_tied_head_share_their_codes() -> None:
    weight, ids = matrix("four_offsets", rows=40), torch.tensor([3, 39, 0])
    ops = gpu_ops()
    embedding, head = ops.embedding(weight, 2.0, torch.float32), ops.lm_head(weight, 0.0)
    wide = weight.dequantize(torch.float32)
    close(embedding(ids), wide[ids] * 2)
    hidden = torch.randn(3, 64)
    close(head(hidden), hidden @ wide.t())
    assert embedding.weight is head.product.core.weight


@pytest.mark.parametrize("kind", KINDS)
def test_packing_keeps_the_weight(kind: str) -> None:
    weight = matrix(kind)
    codes = gpu_packing.pack(weight, CPU)
    assert codes is not None
    expected = weight.dequantize(torch.float32)
    if weight.order is not None:
        expected = expected[:, weight.order]
    close(quantized_codes.spread(codes).float(), expected, 1e-3)
    if kind == "four":
        assert codes.zero == 8 and codes.zeros is None
    if kind in ("four_zeros", "bytes"):
        assert codes.offsets is None


def test_what_kernels_cannot_read_is_spread_out() -> None:
    weight = matrix("four", columns=96)
    odd = BlockMatrix(weight.codes[:, :40], weight.scales[:, :1], None, (1, 40))
    assert gpu_packing.pack(odd, CPU) is None
    x = torch.randn(2, 40)
    close(gpu_ops().linear(odd)(x), x @ odd.dequantize(torch.float32).t(), 1e-5)
