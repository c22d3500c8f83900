"""Every family through the GPU backend, in Triton's interpreter, against the CPU backend."""

import pytest
import torch
import triton_interpreter
from model_steps import PADDING, in_company, prompt, run, sequences
from paged_steps import Padding
from tiny_models import SPECS, RandomWeights

triton_interpreter.enable()

from zlm.config import ModelSpec  # noqa: E402
from zlm.ops.backend import Ops  # noqa: E402
from zlm.ops.cpu import CpuOps  # noqa: E402
from zlm.ops.gpu import GpuOps  # noqa: E402

# Padding tokens are computed from memory that nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.wide_programs(monkeypatch)


def gpu_ops(dtype: torch.dtype = torch.float32, **options: object) -> GpuOps:
    return GpuOps(CPU, dtype, **options)  # type: ignore[arg-type]


def assert_like_the_cpu(spec: ModelSpec, ops: Ops, padding: Padding | None) -> None:
    expected = run(spec, sequences(spec, CpuOps(torch.float32)))
    actual = run(spec, sequences(spec, ops), padding)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", SPECS)
def test_logits(name: str) -> None:
    assert_like_the_cpu(SPECS[name], gpu_ops(), PADDING)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_without_padding(name: str) -> None:
    assert_like_the_cpu(SPECS[name], gpu_ops(), None)


@pytest.mark.parametrize("name", ["mistral", "gemma3-softcaps"])
def test_logits_of_gathered_prefills(name: str) -> None:
    assert_like_the_cpu(SPECS[name], gpu_ops(attention="sdpa"), PADDING)


def test_deterministic_logits() -> None:
    assert_like_the_cpu(SPECS["llama-biases"], gpu_ops(deterministic=True), PADDING)


@pytest.mark.parametrize("name", ["llama", "gemma3-softcaps"])
def test_deterministic_bits(name: str) -> None:
    """A sequence alone, in company, in other chunks and decoded: its logits have the same bits."""
    actual, expected = in_company(SPECS[name], gpu_ops(deterministic=True))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("name", "attention"), [("gemma3", "triton"), ("gemma3", "sdpa"), ("gemma4", "triton")]
)
def test_gemma_in_float16_does_not_overflow(name: str, attention: str) -> None:
    """A residual, and what is added to it, far beyond float16's range (CASES 107)."""
    spec, weights = SPECS[name], RandomWeights(SPECS[name])
    for key, tensor in weights.tensors.items():
        if "down_proj" in key or "o_proj" in key:
            tensor.mul_(3e4)
        elif "post_" in key:
            tensor.add_(float(spec.norm_plus_one)).mul_(3e4)
    logits = []
    for ops in (
        CpuOps(torch.float32),
        CpuOps(torch.float16),
        gpu_ops(torch.float16, attention=attention),
    ):
        runner = sequences(spec, ops, weights)
        steps = [runner.step([(0, prompt(spec, 9, 0))]), runner.step([(0, [5])])]
        logits.append(torch.cat([step[0] for step in steps]))
    for narrow in logits[1:]:
        assert narrow.isfinite().all()
        assert torch.cosine_similarity(narrow, logits[0], dim=-1).min() > 0.999
