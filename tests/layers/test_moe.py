"""A mixture of experts of both backends against transformers' own blocks (CASES 109)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import triton_interpreter

triton_interpreter.enable()

from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock  # noqa: E402
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock  # noqa: E402

from zlm.config import ExpertsSpec, ModelSpec  # noqa: E402
from zlm.layers.moe import MixtureMLP  # noqa: E402
from zlm.layers.parameters import Parameters  # noqa: E402
from zlm.ops.backend import Ops  # noqa: E402
from zlm.ops.cpu import CpuOps  # noqa: E402
from zlm.ops.gpu import GpuOps  # noqa: E402

HIDDEN, SIZE, COUNT, CHOSEN, SHARED = 32, 24, 6, 2, 20
NEVER = 3  # an expert that no token chooses
OPS: dict[str, Callable[[], Ops]] = {
    "cpu": lambda: CpuOps(torch.float32),
    "gpu": lambda: GpuOps(torch.device("cpu"), torch.float32),  # in Triton's interpreter
}


def mixtral() -> tuple[Any, ExpertsSpec]:
    """Shares are normalized."""
    config = transformers.MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        num_local_experts=COUNT,
        num_experts_per_tok=CHOSEN,
    )
    return MixtralSparseMoeBlock(config), ExpertsSpec(count=COUNT, chosen=CHOSEN, size=SIZE)


def qwen2_moe() -> tuple[Any, ExpertsSpec]:
    """Shares are not normalized, and all tokens have an expert beside."""
    config = transformers.Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=SIZE,
        num_experts=COUNT,
        num_experts_per_tok=CHOSEN,
        shared_expert_intermediate_size=SHARED,
        norm_topk_prob=False,
    )
    spec = ExpertsSpec(count=COUNT, chosen=CHOSEN, size=SIZE, normalize=False, shared_size=SHARED)
    return Qwen2MoeSparseMoeBlock(config), spec


def our_tensors(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the block's parameters under the names of a checkpoint."""
    tensors = {name: value.detach().clone() for name, value in block.named_parameters()}
    both, down = tensors.pop("experts.gate_up_proj"), tensors.pop("experts.down_proj")
    for index in range(COUNT):
        gate, up = both[index].chunk(2)
        tensors[f"experts.{index}.gate_proj.weight"] = gate
        tensors[f"experts.{index}.up_proj.weight"] = up
        tensors[f"experts.{index}.down_proj.weight"] = down[index]
    return tensors


class NoNorm:
    """Gives rows as they are."""

    eps = 1e-6
    weight = torch.ones(HIDDEN)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(("backend", "shift"), [("cpu", 0.0), ("cpu", -50.0), ("gpu", -50.0)])
@pytest.mark.parametrize("family", [mixtral, qwen2_moe])
def test_like_transformers(backend: str, family: Callable, shift: float) -> None:
    """1 token and many, one expert never chosen, router logits all far below 0."""
    block, experts = family()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        block.gate.weight[:, 0] = shift  # x begins with 1: a bias
        block.gate.weight[NEVER, 0] = shift - 100
    x = torch.randn(300, HIDDEN, generator=generator)
    x[:, 0] = 1.0
    spec = ModelSpec(
        architecture="mixtral", vocab_size=8, hidden_size=HIDDEN, intermediate_size=SIZE,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_position=8, rms_norm_eps=1e-6,
        experts=experts,
    )  # fmt: skip
    tensors = our_tensors(block)
    with torch.inference_mode():
        ours = MixtureMLP(Parameters(tensors.__getitem__, tensors.keys(), OPS[backend]()), spec)
        logits = x @ block.gate.weight.T
        assert (logits.max() < 0) == (shift < 0)
        assert NEVER not in logits.topk(CHOSEN).indices
        for rows in (x[:1], x if backend == "cpu" else x[:40]):  # the interpreter is slow
            residual = torch.randn(rows.shape, generator=generator)
            wanted = residual + block.double()(rows[None].double())[0]
            got = ours.add(rows, residual.clone(), NoNorm())
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=5e-5)
