"""Kernels that start before the one before them has ended, in a graph: as without.

Chains are long, of small kernels, and go back and forth between few buffers, so that one which
reads too early, or writes too early, meets what it must not. Buffers are poisoned before a replay.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from model_steps import PADDING, prompt, sequences
from msgspec.structs import replace as with_facts
from paged_steps import on
from tiny_models import SPECS
from torch import Tensor

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="programmatic dependent launch needs compute capability 9.0",
)

REPLAYS, LAYERS = 20, 12
WIDTH, INNER = 576, 512


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda") * scale


def check(
    chain: Callable[[bool], None], inputs: Callable[[], None], scratch: Sequence[Tensor],
    results: Sequence[Tensor], *, exact: bool = False,
) -> None:  # fmt: skip
    """Compare *results* of ``chain(False)`` with those of replays of ``chain(True)``.

    *inputs* writes what the chain begins with.
    """
    inputs()
    chain(False)
    expected = [result.clone() for result in results]
    assert all(bool(result.isfinite().all()) for result in expected)
    inputs()
    chain(True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(REPLAYS):
        for tensor in scratch:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        inputs()
        graph.replay()
        for got, wanted in zip(results, expected, strict=True):
            tolerance = 0.0 if exact else 1e-4
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inner", [False, True], ids=["", "sandwich"])
@pytest.mark.parametrize("rows", [1, 3, 8, 40, 100])
def test_norms_and_products(rows: int, inner: bool) -> None:
    """norm, product, gate, product and residual; many rows by the tile of fixed size."""
    from zlm.kernels import gated, linear_small, rms_norm

    start, norm = random(rows, WIDTH, seed=0), 1 + 0.1 * random(WIDTH, seed=1)
    wide = [random(2 * INNER, WIDTH, seed=2 + i, scale=WIDTH**-0.5) for i in range(3)]
    narrow = [random(WIDTH, INNER, seed=5 + i, scale=INNER**-0.5) for i in range(3)]
    hidden, x = torch.empty_like(start), torch.empty_like(start)
    both = torch.empty(rows, 2 * INNER, device="cuda")
    half = torch.empty(rows, INNER, device="cuda")
    fixed = rows > linear_small.MOST_ROWS

    def chain(pdl: bool) -> None:
        for layer in range(LAYERS):
            w, v = wide[layer % 3], narrow[layer % 3]
            if inner:
                rms_norm.rms_norm(hidden, norm, 1e-5, out=x, pdl=pdl)
                linear_small.linear(x, w, out=both, fixed=fixed, pdl=pdl)
                gated.gated(both, "silu", out=half, pdl=pdl)
                linear_small.linear(half, v, out=x, fixed=fixed, pdl=pdl)
                rms_norm.rms_norm(
                    x, norm, 1e-5, out=x, residual=hidden, residual_out=hidden,
                    inner_weight=norm, pdl=pdl,
                )  # fmt: skip
            else:
                linear_small.linear(
                    hidden, w[:INNER], out=half, norm=norm, eps=1e-5, up=w[INNER:],
                    activation="silu", fixed=fixed, pdl=pdl,
                )  # fmt: skip
                linear_small.linear(half, v, out=hidden, residual=hidden, fixed=fixed, pdl=pdl)

    check(chain, lambda: hidden.copy_(start), [x, both, half], [hidden])


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_library_product_in_between(rows: int) -> None:
    """cuBLAS and torch neither start early nor let others."""
    from zlm.kernels import linear_small, rms_norm

    start, norm = random(rows, WIDTH, seed=0), 1 + 0.1 * random(WIDTH, seed=1)
    weights = [random(WIDTH, WIDTH, seed=2 + i, scale=WIDTH**-0.5) for i in range(4)]
    hidden, x, y = (torch.empty_like(start) for _ in range(3))

    def chain(pdl: bool) -> None:
        for _ in range(LAYERS):
            rms_norm.rms_norm(hidden, norm, 1e-5, out=x, pdl=pdl)
            torch.mm(x, weights[0].t(), out=y)
            rms_norm.rms_norm(y, norm, 1e-5, out=x, pdl=pdl)
            linear_small.linear(x, weights[1], out=y, fixed=rows > 64, pdl=pdl)
            torch.mm(y, weights[2].t(), out=x)
            x.mul_(2.0)
            linear_small.linear(x, weights[3], out=y, fixed=rows > 64, pdl=pdl)
            hidden.add_(y)

    check(chain, lambda: hidden.copy_(start), [x, y], [hidden])


@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_embedding_and_rotary(tokens: int) -> None:
    """All layers write one buffer of q, k and v, in place, and their own caches."""
    from zlm.kernels import embedding, rms_norm, rotary_kv

    heads, kv_heads, head_dim, block_size = 9, 3, 64, 16
    width = (heads + 2 * kv_heads) * head_dim
    table = random(500, width, seed=0)
    ids = torch.randint(0, 500, (tokens,), device="cuda")
    positions = torch.arange(tokens, device="cuda") + 3
    slots = torch.randperm(tokens, device="cuda") + block_size
    angles = random(1000, head_dim // 2, seed=1)
    turns = torch.polar(torch.ones_like(angles), angles)
    norm, head_norm = 1 + 0.1 * random(width, seed=2), 1 + 0.1 * random(head_dim, seed=3)
    qkv, total = torch.empty(tokens, width, device="cuda"), torch.empty(tokens, width).cuda()
    caches = torch.zeros(LAYERS, 2 + tokens // block_size, kv_heads, 2, block_size, head_dim)
    caches = caches.cuda()
    q = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))

    def chain(pdl: bool) -> None:
        embedding.embedding(ids, table, 0.5, out=total, pdl=pdl)
        for layer in range(LAYERS):
            rms_norm.rms_norm(total, norm, 1e-5, out=qkv, pdl=pdl)
            rotary_kv.rotary_kv(
                qkv, positions, slots, turns, caches[layer], q_out=q, q_weight=head_norm,
                k_weight=head_norm, pdl=pdl,
            )  # fmt: skip
            rms_norm.rms_norm(qkv, norm, 1e-5, out=qkv, residual=total, residual_out=total, pdl=pdl)

    check(chain, lambda: caches.zero_(), [qkv, total], [qkv, total, caches])


@pytest.mark.parametrize("cut", [False, True], ids=["", "cut"])
@pytest.mark.parametrize("rows", [1, 6])
def test_steps_that_feed_each_other(rows: int, cut: bool) -> None:
    """A token is drawn, put into the table, read from it, and its row of logits drawn from."""
    from zlm.kernels import embedding, sampling, sampling_columns, step_state

    vocab, length, block_size = 9000, 40, 16
    likely = random(vocab, vocab, seed=0, scale=3.0)
    dummy = rows
    table = torch.zeros(rows + 1, length, dtype=torch.int32, device="cuda")
    blocks = torch.randint(1, 90, (2, rows + 1, 3), dtype=torch.int32, device="cuda")
    blocks[:, dummy] = 0
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    offsets = torch.arange(rows + 1, dtype=torch.int32, device="cuda")

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows + 1,), value, dtype=dtype, device="cuda")

    columns = sampling_columns.Columns(
        seeds=torch.arange(rows + 1, device="cuda") * 7919,
        temperature=column(0.8),
        min_p=column(0.001),
        top_k=column(50, torch.int32),
        top_p=column(0.95),
    )
    scratch = sampling_columns.allocate(rows, vocab, "cuda")
    ids, positions = (torch.empty(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    lengths = torch.empty(rows, dtype=torch.int32, device="cuda")
    mapping = torch.empty(2, rows, dtype=torch.int64, device="cuda")
    tables = torch.empty(2, rows, 3, dtype=torch.int32, device="cuda")
    logits = torch.empty(rows, vocab, device="cuda")
    drawn = torch.empty(rows, dtype=torch.int32, device="cuda")
    status = torch.empty(rows, dtype=torch.uint8, device="cuda")

    def chain(pdl: bool) -> None:
        for _ in range(LAYERS):
            step_state.prepare(
                slots, starts, offsets, table, blocks, block_size=block_size, most=1, advance=True,
                token_ids=ids, positions=positions, seq_lens=lengths, slot_mapping=mapping, pdl=pdl,
            )  # fmt: skip
            step_state.gather_blocks(slots, lengths, blocks, block_size, out=tables, pdl=pdl)
            embedding.embedding(ids, likely, 1.0, out=logits, pdl=pdl)
            sampling.sample(
                logits, columns, slots, lengths, out=drawn, status=status, scratch=scratch,
                tokens=table, min_p=cut, top_k=cut, top_p=cut, pdl=pdl,
            )  # fmt: skip

    def inputs() -> None:
        table.zero_()
        table[:, 0] = torch.arange(rows + 1)
        starts.zero_()

    buffers = [ids, positions, lengths, mapping, tables, logits, drawn, status, scratch.peak]
    check(chain, inputs, buffers, [table, mapping, tables, drawn], exact=True)
    assert int((table[:rows, 1 : LAYERS + 1] > 0).sum()) > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 3, 9, 40])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3-softcaps"])
def test_models(
    name: str, rows: int, dtype: torch.dtype, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of a whole model, its residual and its caches as they are after each other.

    ahead: attention reads before the kernel before it has ended, as in large models.
    """
    from zlm.ops import gpu_attention
    from zlm.ops.gpu import GpuOps
    from zlm.ops.gpu_linear import Reach

    monkeypatch.setattr(gpu_attention, "EARLY_COLUMNS", 1 if ahead else 1 << 30)
    facts = {"hidden_size": 320, "intermediate_size": 704, "vocab_size": 1000, "head_dim": 64}
    windows = tuple(20 * window for window in SPECS[name].layer_windows) * 4
    spec = with_facts(SPECS[name], num_layers=8, layer_windows=windows, **facts)
    results = []
    for pdl in (False, True):
        ops = GpuOps(torch.device("cuda"), dtype, pdl=pdl)
        runner = sequences(spec, ops, block_size=16)
        for parts in (runner.model.ends.head.product, *_products(runner.model)):
            # The same kernels, whether they overlap or not.
            parts.reach = Reach(64, overlaps=pdl, norms=True)
        runner.step([(i, prompt(spec, 3 + i % 5, i)) for i in range(rows)])
        ids = [(i, prompt(spec, 1, 100 + i)) for i in range(rows)]
        batch, places = PADDING.pad(runner.batch(ids), lengths=False)
        results.append(_replayed(runner, on(batch, ops.device), places))
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


def _products(model: object) -> list:
    return [
        product
        for layer in model.layers  # type: ignore[attr-defined]
        for product in (layer.attention.qkv, layer.attention.out, layer.mlp.gated, layer.mlp.down)
    ]


def _replayed(runner: object, batch: object, places: Tensor) -> Tensor:
    """Return the logits of *batch* at *places* (others are padding's), the same in each replay."""

    def step() -> Tensor:
        return runner.model.logits(runner.model.forward(batch, runner.caches))  # type: ignore

    with torch.inference_mode():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        graph.replay()
        first = logits[places]
        for _ in range(REPLAYS):
            logits.fill_(float("nan"))
            graph.replay()
            assert torch.equal(logits[places], first), "a moving result is a race"
    assert bool(first.isfinite().all())
    return first
