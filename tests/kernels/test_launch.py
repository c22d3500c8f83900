"""Direct launches: the kernel that Triton would have chosen gets what it would have been given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from zlm.kernels.launch import cdiv, power_of_two

# Stands for a GPU: compiles nothing, and each kernel that Triton asks for says what it is given.
PROGRAM = '''
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from zlm.kernels.launch import direct
from zlm.worker.kernel_variants import use_target

use_target(("cuda", 90, 32))
made, launched = [], []


class Compiled(CompiledKernel):
    packed_metadata = None

    def __init__(self, function):
        self.function = function

    def launch_metadata(self, *_):
        return None

    @property
    def run(self):
        return lambda *given: launched.append(given)


def compile(self, key, signature, device, constants, options, attributes, warmup):
    made.append(Compiled(len(made)))
    self.device_caches[device][0][key] = made[-1]
    return made[-1]


JITFunction._do_compile = compile


@direct
@triton.jit(do_not_specialize=["count"])
def copy(p_from, p_to, count, stride, scale, p_none, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    tl.store(p_to, tl.load(p_from) * count * stride * scale)


a, b = torch.zeros(64), torch.zeros(64)


def launch(x=a, y=b, count=3, stride=32, scale=0.5, none=None, BLOCK=64, FLAG=True, warps=4):
    copy[(2, 3)](x, y, count, stride, scale, none, BLOCK=BLOCK, FLAG=FLAG, num_warps=warps)
    return launched[-1]


def chosen(**changed):
    """Launch twice: by Triton, or directly if it is known, and directly. Return the kernel."""
    first, second = launch(**changed)[4], launch(**changed)[4]
    assert first == second, (changed, first, second)
    return second


usual = chosen()
assert launched[-1][:3] == (2, 3, 1)
assert launched[-1][9:] == (a.data_ptr(), b.data_ptr(), 3, 32, 0.5, None, 64, True), launched[-1]
assert launch(x=b, y=a)[9:11] == (b.data_ptr(), a.data_ptr())
assert usual == chosen(count=5) == chosen(count=16) == chosen(scale=2.5) == chosen(stride=48)
others = [
    {"x": a[1:]}, {"y": b[2:]}, {"x": a.half()}, {"stride": 1}, {"stride": 33}, {"stride": 2**40},
    {"count": 2**40}, {"BLOCK": 32}, {"FLAG": False}, {"warps": 8}, {"none": a},
]
kernels = [chosen(**other) for other in others]
assert len({usual, *kernels}) == len(others) + 1, kernels
assert len(made) == len(others) + 1, "Triton was asked for a kernel that it had"
assert chosen() == usual
print("as Triton chooses")
'''


def test_the_kernel_is_the_one_that_triton_chooses(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(program)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "as Triton chooses\n", ran.stderr


@pytest.mark.parametrize("value", [0, 1, 2, 3, 64, 65, 49152])
def test_arithmetic(value: int) -> None:
    power = power_of_two(value)
    assert power >= max(value, 1) and power & (power - 1) == 0 and power < max(2 * value, 2)
    assert cdiv(value, 16) * 16 >= value > (cdiv(value, 16) - 1) * 16
