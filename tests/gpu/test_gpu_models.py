"""Tiny models of every family on the card, against the CPU backend, in a graph, and bit by bit."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model_steps import PADDING, in_company, prompt, run, sequences
from msgspec.structs import replace as with_facts
from paged_steps import on
from tiny_models import SPECS

from zlm.ops.batch import StepBatch

CUDA = torch.device("cuda")
# Wide enough for several tiles of every kernel.
WIDER = {
    name: with_facts(
        SPECS[name],
        hidden_size=320,
        intermediate_size=704,
        vocab_size=1000,
        head_dim=head_dim,
        max_position=2048,
        layer_windows=tuple(20 * window for window in SPECS[name].layer_windows),
    )
    for name, head_dim in (("llama", 64), ("qwen3", 128), ("gemma3-softcaps", 256))
}


def gpu_ops(dtype: torch.dtype = torch.float32, **options: object):
    from zlm.ops.gpu import GpuOps

    return GpuOps(CUDA, dtype, **options)


@pytest.mark.parametrize("attention", ["triton", "sdpa", "deterministic"])
@pytest.mark.parametrize("name", SPECS)
def test_logits(name: str, attention: str) -> None:
    from zlm.ops.cpu import CpuOps

    spec = SPECS[name]
    fixed = attention == "deterministic"
    options = {"deterministic": True} if fixed else {"attention": attention}
    expected = run(spec, sequences(spec, CpuOps(torch.float32)))
    actual = run(spec, sequences(spec, gpu_ops(**options)), PADDING)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", WIDER)
def test_half_precision_is_near_float32(name: str, dtype: torch.dtype) -> None:
    spec = WIDER[name]
    expected = run(spec, sequences(spec, gpu_ops(), block_size=16), times=8)
    actual = run(spec, sequences(spec, gpu_ops(dtype), block_size=16), PADDING, times=8)
    assert torch.cosine_similarity(actual, expected, dim=-1).min() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", WIDER)
def test_deterministic_bits(name: str, dtype: torch.dtype) -> None:
    """A sequence alone, in company, in other chunks and decoded: its logits have the same bits."""
    actual, expected = in_company(WIDER[name], gpu_ops(dtype, deterministic=True), times=7)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("N", "K"), [(960, 576), (576, 1536), (6144, 4096), (1000, 100)])
def test_fixed_products_bit_by_bit(N: int, K: int, dtype: torch.dtype) -> None:
    ops = gpu_ops(dtype, deterministic=True)
    generator = torch.Generator(CUDA).manual_seed(0)
    weight = torch.randn(N, K, generator=generator, device=CUDA).to(dtype) * K**-0.5
    x = torch.randn(300, K, generator=generator, device=CUDA).to(dtype)
    norm = ops.norm(torch.randn(K, generator=generator, device=CUDA), 1e-5)
    product, gated = ops.linear(weight), ops.gated(weight, weight, None, None, "silu")
    for run_rows in (lambda rows: product(rows, norm), lambda rows: gated(rows, norm)):
        whole = run_rows(x)
        for rows in (1, 2, 16, 17, 63, 64, 65, 299):
            assert torch.equal(run_rows(x[-rows:].contiguous()), whole[-rows:]), rows


def wide_tables(batch: StepBatch, columns: int = 24) -> StepBatch:
    """Return *batch* on the card, with block tables as wide as a runner's."""
    groups = [
        replace(g, block_table=F.pad(g.block_table, (0, columns - g.block_table.shape[1])))
        for g in batch.groups
    ]
    return on(replace(batch, groups=groups), CUDA)


def copy_into(static: StepBatch, batch: StepBatch) -> None:
    for name in ("token_ids", "positions", "query_starts", "seq_lens"):
        getattr(static, name).copy_(getattr(batch, name))
    for mine, new in zip(static.groups, batch.groups, strict=True):
        mine.slot_mapping.copy_(new.slot_mapping)
        mine.block_table.copy_(new.block_table)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", ["llama", "gemma3-softcaps"])
@pytest.mark.parametrize("rows", [[1, 1, 1], [1] * 9, [1, 1, 40, 7]], ids=str)
def test_a_step_in_a_graph(name: str, rows: list[int], deterministic: bool) -> None:
    """Captured with one step's inputs and replayed with others': what differs is on the device."""
    spec = WIDER[name]
    runner = sequences(spec, gpu_ops(torch.bfloat16, deterministic=deterministic), block_size=16)
    runner.step([(0, prompt(spec, 70, 0)), (1, prompt(spec, 33, 1))])

    def batch(turn: int) -> tuple[StepBatch, torch.Tensor]:
        ids = [(i, prompt(spec, n, 10 * turn + i)) for i, n in enumerate(rows)]
        padded, places = PADDING.pad(runner.batch(ids), lengths=False)
        return wide_tables(padded), places

    def step(inputs: StepBatch) -> torch.Tensor:
        return runner.model.logits(runner.model.forward(inputs, runner.caches))

    tolerance = 0.0 if deterministic else 2e-2  # a library may choose otherwise in a graph
    with torch.inference_mode():
        static, _ = batch(0)
        step(static)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(static)
        for turn in (1, 2):
            inputs, places = batch(turn)
            expected = step(inputs)[places]
            copy_into(static, inputs)
            graph.replay()
            torch.testing.assert_close(logits[places], expected, rtol=tolerance, atol=tolerance)
