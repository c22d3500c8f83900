"""A model quantized as it is read, through the GPU backend in Triton's interpreter.

It is compared with the CPU's of the same weights, dequantized.
"""

import pytest
import torch
import triton_interpreter
from model_steps import prompt
from msgspec.structs import replace
from paged_steps import PagedSequences
from tiny_models import SPECS, RandomWeights

triton_interpreter.enable()

from zlm.models import registry  # noqa: E402
from zlm.ops.backend import Ops  # noqa: E402
from zlm.ops.cpu import CpuOps  # noqa: E402
from zlm.ops.gpu import GpuOps  # noqa: E402
from zlm.weights.online import OnlineQuantized  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")


class Dequantized:
    """The same weights in float32."""

    def __init__(self, online: OnlineQuantized) -> None:
        self.online = online

    def names(self) -> list[str]:
        return list(self.online.names())

    def get(self, name: str) -> torch.Tensor:
        matrix = self.online.matrix(name)
        return self.online.get(name) if matrix is None else matrix.dequantize(torch.float32)


def test_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.wide_programs(monkeypatch)
    spec = replace(SPECS["llama"], intermediate_size=64)
    online = OnlineQuantized(RandomWeights(spec), "w4a16")

    def logits(ops: Ops, *, quantized: bool) -> torch.Tensor:
        model = registry.build(
            spec,
            online if quantized else Dequantized(online),
            ops=ops,
            max_model_len=spec.max_position,
            quantized=online.matrix if quantized else None,
        )
        runner = PagedSequences(model, spec, num_blocks=60, block_size=4, ops=ops, dtype=ops.dtype)
        steps = [[(0, prompt(spec, 6, 0))], [(0, prompt(spec, 1, 1))]]
        return torch.cat([row for rows in steps for row in runner.step(rows, None)])

    expected = logits(CpuOps(torch.float32), quantized=False)
    actual = logits(GpuOps(CPU, torch.float32), quantized=True)
    assert float((actual - expected).norm() / expected.norm()) < 2e-3
