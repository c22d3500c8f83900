"""Launching a compiled kernel without asking Triton again which one it is.

``kernel[grid](...)`` of Triton takes 20 to 60 µs of the host: it binds the arguments, describes
each, writes that down as text and looks the kernel up by it; a step of 30 layers launches 250.
``direct`` keeps the answer by what the description is made of (types, alignment to 16 bytes, which
integers are 1 or multiples of 16, constants and options), and the next launch hands addresses and
numbers straight to the compiled kernel. The rest is Triton's: a kernel that is not known yet is
launched, compiled and kept by it, and its interpreter and its hooks see what they did before.

Rests on ``CompiledKernel.run``, the same from Triton 3.6 to 3.8. Also here: arithmetic of grids and
blocks for host code, where Triton's own, meant for kernels, takes 5 µs a call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

INT32_MAX = 2**31 - 1
INTERPRETER_PROCESSORS = 3  # that grids are cut for where there is no card to fill


def direct(function: Any) -> Any:
    """Make launches of *function*, a ``triton.jit`` kernel, direct once it is compiled.

    They give every tensor and number by position, every constant by name, and leave out none.
    """
    if type(function) is JITFunction:  # not under the interpreter
        function.__class__ = _DirectKernel
        function.launches = {}
    return function


class _DirectKernel(JITFunction):  # type: ignore[misc]
    """A kernel with its launches: key → what ``CompiledKernel.run`` is, and is given."""

    launches: dict[tuple[Any, ...], tuple[Any, ...]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            device = driver.active.get_current_device()
            given, key = _described(args)
            key += (device, *constants, *constants.values())
            known = self.launches.get(key)
            if known is None:
                self._first(grid, key, args, constants)
                return
            run, compiled, metadata, rest = known
            stream = driver.active.get_current_stream(device)
            x, y, z = (*grid, 1, 1)[:3]
            run(x, y, z, stream, compiled, metadata, None, None, None, *given, *rest)

        return launch

    def _first(
        self,
        grid: tuple[int, ...],
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        """Launch by Triton, and keep what it found unless it was told not to launch."""
        found = self.run(*args, grid=grid, warmup=False, **constants)
        if isinstance(found, CompiledKernel):
            rest = [constants[name] for name in self.arg_names[len(args) :]]
            self.launches[key] = found.run, found.function, found.packed_metadata, rest


def _described(args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return *args* with addresses for tensors, and all that tells compiled kernels apart."""
    given: list[Any] = []
    kinds: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            given.append(address)
            kinds.append(value.dtype)
            kinds.append(address % 16 == 0)
            continue
        given.append(value)
        if isinstance(value, int):
            wide = not -INT32_MAX <= value <= INT32_MAX
            kinds.append(1 if value == 1 else (value % 16 == 0, wide, value > 2**63 - 1))
        else:
            kinds.append(value.__class__)
    return given, tuple(kinds)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(value: int) -> int:
    """Return the least power of two that is not below *value*, at least 1."""
    return 1 << max(value - 1, 0).bit_length()


@functools.cache
def processors_of(device: torch.device) -> int:
    """Return the multiprocessors of *device*."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
