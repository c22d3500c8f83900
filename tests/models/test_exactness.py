"""A sequence's logits have the same bits whatever else is in the step, and in bfloat16 they hold.

CASES 25.

Run in a process of their own: MKL reads its setting (``zlm.ops.cpu_process``) when torch is loaded.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paged_steps import PagedSequences
from tiny import tiny_checkpoint

from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops import cpu_process, onednn
from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_native import NativeKernels
from zlm.weights.load import open_weights
from zlm.worker import native_build

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma4", "qwen2_moe", "llama4"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("exact"), request.param, tokenizer=False)


def sequences(
    folder: Path, dtype: torch.dtype = torch.float32, native: NativeKernels | None = None
) -> PagedSequences:
    spec, ops = load_spec(folder), CpuOps(dtype, native=native)
    model = registry.build(spec, open_weights(folder, spec), ops=ops, max_model_len=512)
    return PagedSequences(model, spec, dtype=dtype, ops=ops)


def check_company(folder: Path, *, with_kernels: bool) -> None:
    """Decode and prefill one sequence alone and in growing company; compare the bits."""
    library = native_build.library() if with_kernels else None
    native = None if library is None else NativeKernels(library)
    assert (native is not None) == with_kernels
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(10, 200, (length,), generator=generator).tolist()
        for length in (40, 3, 90, 41, 17, 64)
    ]
    tokens = [torch.randint(10, 200, (8,), generator=generator).tolist() for _ in prompts]
    alone = []
    for i, prompt in enumerate(prompts):
        runner = sequences(folder, native=native)
        outputs = [runner.step([(i, prompt)])[0]]
        outputs += [runner.step([(i, [token])])[0] for token in tokens[i]]
        alone.append(outputs)
    runner = sequences(folder, native=native)
    for i, logits in enumerate(runner.step(list(enumerate(prompts)))):
        assert torch.equal(logits, alone[i][0]), f"prompt {i}"
    for tick in range(8):
        company = range(tick % len(prompts) + 1) if tick < 3 else range(len(prompts))
        rows = [(i, [tokens[i][runner.lengths[i] - len(prompts[i])]]) for i in company]
        for (i, _), logits in zip(rows, runner.step(rows), strict=True):
            done = runner.lengths[i] - len(prompts[i])
            assert torch.equal(logits, alone[i][done]), f"row {i} at token {done}"


@pytest.mark.skipif(not onednn.can_pack(torch.float32), reason="no packed products here")
@pytest.mark.parametrize("with_kernels", [False, True])
def test_company_does_not_change_a_bit(folder: Path, with_kernels: bool) -> None:
    call = f"t.check_company(pathlib.Path({str(folder)!r}), with_kernels={with_kernels})"
    code = f"import pathlib, test_exactness as t; {call}"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "support")])
    environment = os.environ | cpu_process.ENVIRONMENT | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_bfloat16_is_near_float32(folder: Path, native_kernels: NativeKernels) -> None:
    prompt = list(range(20, 60))
    wide, narrow = sequences(folder), sequences(folder, torch.bfloat16, native_kernels)
    for rows in ([(0, prompt)], [(0, [7])], [(0, [9])]):
        expected, actual = wide.step(rows)[0], narrow.step(rows)[0]
        assert actual.dtype == torch.float32
        similarity = torch.cosine_similarity(actual, expected, dim=-1)
        assert similarity.min() > 0.99
