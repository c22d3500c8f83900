"""Compiles the CPU's kernels (``kernels/cpu_*.c``) for this machine, and keeps the result.

The library lies beside the GPU's compiled kernels, under a name made of all that it depends on
(sources, flags, compiler and the processor's abilities) and of what is in it, so that one that was
cut short is not loaded. Where it cannot be made, torch's operations do the same more slowly, and a
warning says why. Imports no torch.
"""

import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from zlm.config import Resolved
from zlm.worker import kernel_cache

FLAGS = [
    "-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp",
    "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
]  # fmt: skip
COMPILERS = ("gcc", "cc", "clang")
LIMIT_SECONDS = 60.0
SCRATCH = ".zlm-cpu-"  # what folders to compile in begin with

log = logging.getLogger("zlm.worker")


def start_early(resolved: Resolved) -> None:
    """Have the library compiled, if it is not there, while torch is imported."""
    if resolved.device == "cpu" and resolved.spec.pooling is None:
        threading.Thread(target=library, name="zlm-cpu-kernels", daemon=True).start()


def library() -> Path | None:
    """Return this process's library; waits for what ``start_early`` has begun."""
    with _building:
        return _library()


_building = threading.Lock()


@functools.cache
def _library() -> Path | None:
    return build()


def build(environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """Return the library, compiled now or at an earlier start; None if there cannot be one."""
    sources = kernel_cache.kernel_files("cpu_*.[ch]")
    chosen = compiler(environment)
    if chosen is None:
        named = environment.get("CC")
        lacking = f"CC={named} is not found" if named else "no C compiler: install gcc"
        log.warning("%s. Without kernels of its own the CPU decodes more slowly", lacking)
        return None
    try:
        folder = kernel_cache.prepare(environment)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"zlm-cpu-{_digest(sources, chosen)}"
        if (kept := _kept(folder, name)) is not None:
            return kept
        log.info("compiling the CPU kernels with %s", chosen)
        _clear(folder, len(sources) * LIMIT_SECONDS)
        return _compile(chosen, sources, folder, name)
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or "").strip()
        reason = f"{error} {told}".strip()
        log.warning("the CPU kernels cannot be compiled, decoding takes longer: %s", reason)
        return None


def _clear(folder: Path, seconds: float) -> None:
    """Remove what compilers have left that were killed: what is older than *seconds*."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        if time.time() - scratch.stat().st_mtime > seconds:
            shutil.rmtree(scratch, ignore_errors=True)


def _kept(folder: Path, name: str) -> Path | None:
    """Return the library of *name* that is whole, if there is one."""
    for path in folder.glob(f"{name}-*.so"):
        if path == _named(folder, name, path.read_bytes()):
            return path
    return None


def _named(folder: Path, name: str, content: bytes) -> Path:
    return folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the C compiler: CC, as Triton takes it, or the first that is there."""
    names = [environment["CC"]] if environment.get("CC") else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


def _digest(sources: list[Path], compiler: str) -> str:
    version = _run([compiler, "--version"])
    facts = [version.encode(), " ".join(FLAGS).encode(), _abilities()]
    digest = hashlib.sha256()
    for fact in [*facts, *(path.read_bytes() for path in sources)]:
        digest.update(len(fact).to_bytes(8, "little") + fact)
    return digest.hexdigest()[:32]


def _abilities() -> bytes:
    """Return what tells this kind of processor from others: -march=native depends on it."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        told = ""
    lines = re.findall(r"(?m)^(?:flags|Features|model name|cpu family|model)\s*:.*$", told)
    return "\n".join([platform.machine(), *dict.fromkeys(lines)]).encode()


def _compile(compiler: str, sources: list[Path], folder: Path, name: str) -> Path:
    """Compile to a library of *name* in *folder*, and return it.

    Objects are linked without OpenMP's library: the functions that they call are then those of the
    one that torch has loaded, whatever its name, whose threads are so torch's.
    """
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        library, objects = f"{scratch}/library.so", []
        for source in sources:
            if source.suffix == ".c":
                objects.append(f"{scratch}/{source.stem}.o")
                _run([compiler, *FLAGS, "-c", str(source), "-o", objects[-1]])
        _run([compiler, "-shared", "-o", library, *objects])
        path = _named(folder, name, Path(library).read_bytes())
        os.replace(library, path)
    return path


def _run(command: list[str]) -> str:
    """Return what *command* prints. Raises SubprocessError, with its words, if it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
        timeout=LIMIT_SECONDS,
    )
    return done.stdout
