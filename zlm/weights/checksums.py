"""What was downloaded is what the hub has: sums of its large files, compared when they come.

huggingface_hub looks at sizes alone. It names a large file in its cache by the SHA-256 that the hub
told, so that is there to compare with, and with a processor's instructions for it 16 GB take some
ten seconds, once. A file that differs is removed, so that the next start fetches it again.
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zlm.errors import ModelError

SUM_DIGITS = 64  # of SHA-256; small files have names of 40, of git
THREADS = 4


def check_new(paths: Iterable[Path], since: float) -> None:
    """Raise ModelError that names it if one of *paths* is not what its name in the cache says.

    Of links to files of the cache, those that were written after *since* (time.time()).
    """
    new = []
    for path in paths:
        stored = path.resolve()
        is_sum = len(stored.name) == SUM_DIGITS and stored.name.isalnum()
        if is_sum and stored.stat().st_mtime >= since:
            new.append((path, stored))
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(_sum, (stored for _, stored in new)))
    for (path, stored), found in zip(new, sums, strict=True):
        if found != stored.name:
            path.unlink(missing_ok=True)
            stored.unlink(missing_ok=True)
            raise ModelError(
                f"{path.name} came damaged: its SHA-256 is {found[:12]}..., and the hub says "
                f"{stored.name[:12]}...; it has been removed, starting again fetches it"
            )


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
