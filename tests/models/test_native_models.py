"""Every family with the CPU's compiled kernels, against torch's operations alone."""

import pytest
import torch
from model_steps import run, sequences
from tiny_models import SPECS

from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_native import NativeKernels


@pytest.mark.parametrize("name", SPECS)
def test_logits(native_kernels: NativeKernels, name: str) -> None:
    spec = SPECS[name]
    expected = run(spec, sequences(spec, CpuOps(torch.float32)))
    actual = run(spec, sequences(spec, CpuOps(torch.float32, native=native_kernels)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
