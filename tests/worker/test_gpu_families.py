"""The GPU runner, in Triton's interpreter, with models unlike Llama, against the CPU runner."""

import pytest
import triton_interpreter

triton_interpreter.enable()

import runner_pairs  # noqa: E402
from model_steps import prompt  # noqa: E402
from runner_pairs import Setting  # noqa: E402
from tiny_models import SPECS, RandomWeights  # noqa: E402
from worker_steps import join  # noqa: E402

from zlm.worker import gpu_steps  # noqa: E402

# Padding tokens are computed from memory that nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def cheap_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller buckets, hence less padding: each program takes the interpreter milliseconds."""
    triton_interpreter.wide_programs(monkeypatch)
    monkeypatch.setattr(gpu_steps, "MIXED_DECODES", (0, 4))
    monkeypatch.setattr(gpu_steps, "_prefill_bucket", lambda tokens: -(-tokens // 16) * 16)


@pytest.mark.parametrize("name", ["mixtral", "gemma4"])
def test_prefill_decodes_and_both_at_once(name: str) -> None:
    """Experts chosen among padding; KV groups of two geometries, and a layer that only reads."""
    spec, setting = SPECS[name], Setting(num_blocks=12, max_num_seqs=3)
    resolved, weights = runner_pairs.resolved_for(spec, setting), RandomWeights(spec)
    gpu = runner_pairs.assembled(resolved, weights, setting)
    cpu = runner_pairs.cpu_runner(resolved, weights, setting.num_blocks, setting.max_num_seqs)
    pair = runner_pairs.Pair(gpu.runner, cpu, len(resolved.kv_groups))
    first, second = prompt(spec, 11, 0), prompt(spec, 9, 1)
    pair.step([(1, 0, 11, 1)], [join(1, first)])
    pair.step([(0, 0, 5, 0), (1, 11, 1, 1)], [join(0, second)])
    pair.step([(0, 5, 4, 1), (1, 12, 1, 1)])
    pair.step([(0, 9, 1, 1), (1, 13, 1, 1)])
