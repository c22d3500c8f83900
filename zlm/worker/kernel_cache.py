"""Where compiled kernels are kept from one start to the next.

Triton keys what it compiles by content (source, types, options, card, its own version), so a cache
is never wrong, only incomplete. This module chooses the folder, before Triton is imported: the
user's own TRITON_CACHE_DIR, systemd's CacheDirectory, or the XDG cache. What lies there is loaded
and run: the folder must be this user's, and nobody else's to write. Imports neither torch nor
Triton.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

import msgspec

from zlm.config import Resolved, ServerOptions

log = logging.getLogger("zlm.worker")

FOLDER_VARIABLE = "TRITON_CACHE_DIR"
BINARY_ONLY_VARIABLE = "TRITON_STORE_BINARY_ONLY"  # the steps between source and binary: not kept


def prepare(environment: MutableMapping[str, str] = os.environ) -> Path:
    """Have Triton keep compiled kernels in the folder that is returned; before it is imported.

    Where no folder can be had, kernels are compiled at each start, and a warning says so.
    """
    environment.setdefault(BINARY_ONLY_VARIABLE, "1")
    if given := environment.get(FOLDER_VARIABLE):
        return Path(given)
    reasons = []
    for parent in candidates(environment):
        try:
            folder = own_folder(parent / "kernels")
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror or error}")
            continue
        break
    else:
        folder = Path(tempfile.mkdtemp(prefix="zlm-kernels-"))
        log.warning(
            "compiled kernels cannot be kept (%s): every start compiles them. Set %s to a folder "
            "that can be written to",
            "; ".join(reasons),
            FOLDER_VARIABLE,
        )
    environment[FOLDER_VARIABLE] = str(folder)
    return folder


def candidates(environment: MutableMapping[str, str]) -> Iterator[Path]:
    """Yield the folders under which the cache may lie, best first."""
    systemd = environment.get("CACHE_DIRECTORY", "").partition(":")[0]
    if systemd:
        yield Path(systemd)
    xdg = environment.get("XDG_CACHE_HOME", "")
    if xdg.startswith("/"):  # a relative path is to be ignored, its specification says
        yield Path(xdg) / "zlm"
    home = environment.get("HOME", "")
    if home.startswith("/"):
        yield Path(home) / ".cache" / "zlm"


def own_folder(path: Path) -> Path:
    """Make *path* (0700) or see that it is a folder of this user's alone; OSError if it is not."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        path.chmod(0o700)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written to")
    return path


@functools.cache
def hash_triton() -> threading.Thread:
    """Have Triton hash itself, half a gigabyte, in this process's one thread for it.

    Keys of kernels begin so. It takes no torch: begun first, it is done when torch is imported.
    """

    def work() -> None:
        from triton.runtime.cache import triton_key

        triton_key()

    return _started(work)


def hash_kernels() -> threading.Thread:
    """Have Triton hash itself and then every kernel, in a thread.

    Join the thread before the first launch, else the work is done twice, or in another order.
    """

    def work() -> None:
        hash_triton().join()
        from zlm.worker.kernel_variants import settle_keys

        settle_keys()

    hash_triton()
    return _started(work)


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="zlm-kernel-keys", daemon=True)
    thread.start()
    return thread


class WarmMark:
    """Remembers in the cache's folder that a server has found all of its kernels there.

    Looking for what is missing costs seconds, so a start like one before it does not look. A mark
    without its kernels costs no more than compiling them one by one.
    """

    def __init__(self, folder: Path, facts: bytes) -> None:
        """*facts*: all that kernels depend on, beside zlm's own code."""
        self._mark = folder / f"warm-{hashlib.sha256(_code() + facts).hexdigest()}"

    def is_set(self) -> bool:
        return self._mark.exists()

    def set(self) -> None:
        """Remember this start; a folder that cannot be written to is no reason to fail."""
        try:
            self._mark.touch()
        except OSError as error:
            log.warning("%s cannot be written: %s", self._mark, error.strerror)


def facts_of(resolved: Resolved, rank: int) -> bytes:
    """Return what kernels of the worker *rank* depend on that is known before CUDA is started."""
    config = msgspec.structs.replace(resolved.config, server=ServerOptions())
    facts = msgspec.structs.replace(resolved, config=config, model_path="", tokenizer_path="")
    return msgspec.json.encode(facts) + f" rank {rank}".encode()


@functools.cache
def _code() -> bytes:
    """Return a digest of zlm's own code."""
    digest = hashlib.sha256()
    for module in (*sorted(Path(__file__).parents[1].rglob("*.py")), *kernel_files("*.py")):
        digest.update(module.read_bytes())
    return digest.digest()


def kernel_files(pattern: str) -> list[Path]:
    """Return the files of ``zlm.kernels``, which lie apart from zlm's others, by *pattern*."""
    spec = importlib.util.find_spec("zlm.kernels")
    folders = spec.submodule_search_locations if spec is not None else None
    return sorted(file for folder in folders or () for file in Path(folder).glob(pattern))
