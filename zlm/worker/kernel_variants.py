"""Which kernels a model needs, each in which variants, found without compiling or running one.

A Triton kernel is compiled anew for each combination of argument types, alignments and constants
that it is launched with. ``Recorder`` finds them: within it steps are executed as usual, but a
kernel that has not been compiled is noted, and not launched. Nothing that a kernel would have
written is there then, so whatever is allocated meanwhile begins as zeros: indices stay in range,
and the results mean nothing.

Rests on Triton's own hook of its JIT cache, on the form in which that describes a variant, and on
``JITFunction.preload``, which compiles it; all as in Triton 3.6.
"""

import functools
import hashlib
import importlib
import json
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

log = logging.getLogger("zlm.worker")

Target = tuple[str, int, int]  # backend, architecture, warp size: ("cuda", 90, 32)
NAME_LENGTH = 150  # of a kernel, in names of files in Triton's cache


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile: where it is, and Triton's description (JSON) of how."""

    module: str
    name: str
    description: str

    @property
    def launcher(self) -> str:
        """What the host code that launches it depends on: a C file, from its arguments' types.

        Variants have it in common, and it takes as long to compile as a small kernel.
        """
        return json.dumps(list(json.loads(self.description)["signature"].values()))


class Recorder:
    """A context in which kernels that are not compiled yet are noted rather than launched.

    ``variants`` are those that are not in the cache on disk either. Steps must run without CUDA
    graphs in it. Under Triton's interpreter kernels run, and nothing is noted.
    """

    def __init__(self, found: Callable[[Variant], None] | None = None) -> None:
        """*found* is told of each of ``variants`` when it is noted."""
        self._found = found
        self.variants: list[Variant] = []
        self.num_cached = 0  # variants that the cache on disk has
        self._compiles: list[tuple[Any, dict[str, Any]]] = []  # how those it has not are compiled
        self._stubs: list[tuple[dict, Any]] = []
        self._zeros = _Zeros()
        self._hook_before: Any = None

    def __enter__(self) -> "Recorder":
        from triton import knobs

        settle_keys()
        self._hook_before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._note
        self._zeros.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from triton import knobs

        self._zeros.__exit__(kind, error, trace)
        knobs.runtime.jit_cache_hook = self._hook_before
        for kernels, key in self._stubs:
            del kernels[key]
        self._stubs = []

    def missing(self) -> list[Variant]:
        """Return those of ``variants`` that are not in the cache by now."""
        pairs = zip(self.variants, self._compiles, strict=True)
        return [variant for variant, compile in pairs if not _is_cached(*compile)]

    def _note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's hook: note the variant and have the launch skipped."""
        variant = Variant(fn.module, fn.name, compile["specialization_data"])
        if _is_cached(fn.jit_function, compile):
            self.num_cached += 1
        else:
            self.variants.append(variant)
            self._compiles.append((fn.jit_function, compile))
            if self._found is not None:
                self._found(variant)
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[compile["key"]] = _NotLaunched  # so that it is noted once
        self._stubs.append((kernels, compile["key"]))
        return True


class _NotLaunched:
    """Stands for a compiled kernel; launching it does nothing."""

    function = packed_metadata = None

    @staticmethod
    def launch_metadata(*_: Any) -> None:
        return None

    @staticmethod
    def run(*_: Any) -> None:
        return None


class _Zeros(TorchFunctionMode):
    """Tensors whose contents are left open begin as zeros.

    Of Python's functions: a mode of dispatch would see all, but imports torch's compiler, 4 s.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTIES else made


_EMPTIES = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}


@functools.cache
def settle_keys() -> None:
    """Have Triton hash every kernel now, in one order: what compiles or launches must begin so.

    It keeps the hash that it makes of a function, and in 3.6 that leaves the global constants of a
    function that is called out if that was not hashed before: it would depend on the order in which
    a process happens to launch kernels, and what one has compiled another would not find.
    """
    from triton.runtime.jit import JITFunction

    from zlm import kernels

    for name in sorted(module.name for module in pkgutil.iter_modules(kernels.__path__)):
        module = importlib.import_module(f"{kernels.__name__}.{name}")
        for value in list(vars(module).values()):
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                _ = value.cache_key


def _is_cached(kernel: Any, description: dict[str, Any]) -> bool:
    """Whether the cache on disk has the variant that the hook describes."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource
    from triton.runtime.cache import get_cache_key, get_cache_manager

    _, _, _, backend, _ = kernel.device_caches[description["device"]]
    given = json.loads(description["specialization_data"])["options"]
    options = backend.parse_options(
        {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )
    attributes = description["configs"][0]
    source = ASTSource(kernel, description["signature"], description["constants"], attributes)
    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    name = f"{source.name[:NAME_LENGTH]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
    return bool(group and name in group)


class _Compiler:
    """A Triton driver that knows what to compile for, and has no device."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(*target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def use_target(target: Target) -> None:
    """Have this process, which needs no GPU, compile for *target* from now on."""
    from triton.runtime.driver import driver

    driver.set_active(_Compiler(target))  # type: ignore[arg-type]


def current_target() -> Target:
    """Return what this process compiles for."""
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def compile_variant(variant: Variant, *, launches: bool = True) -> None:
    """Compile *variant* into the cache; raises if it cannot.

    launches: the host code that launches it, too.
    """
    kernel = getattr(importlib.import_module(variant.module), variant.name)
    compiled = kernel.preload(variant.description)
    if launches and compiled is not None and compiled.metadata.target.backend == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
