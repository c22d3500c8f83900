"""The private runtime directory: where the sockets and the heartbeat page of one tree live.

Owns the directory's life: made with mode 0700, locked while its owner lives, removed at the end.
A directory whose owner was killed stays behind; the next start finds its lock free and removes it.
So it is with any other ``temporary`` directory. Knows nothing of what is put inside.

The lock is a BSD lock on the directory itself: it ends with its owner, however that dies, and
systemd-tmpfiles leaves a locked directory alone however old it is.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from zlm.errors import ConfigError

PREFIX = "zlm-"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its terminating zero
LONGEST_SOCKET_NAME = len("/tokenizer-99999.sock")
LONGEST_NAME = len(PREFIX) + 8


class RuntimeDirectory:
    """A private directory for one tree of processes; a context manager.

    Made under the first of $RUNTIME_DIRECTORY (systemd), $XDG_RUNTIME_DIR, the temporary
    directory and /tmp that can be written to and leaves room for socket paths.
    Raises ConfigError if none does.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        reasons = []
        for parent in candidates(environment):
            room = MAX_SOCKET_PATH_BYTES - LONGEST_SOCKET_NAME - LONGEST_NAME - 1
            if len(os.fsencode(parent)) > room:
                reasons.append(f"{parent} is longer than {room} bytes, which sockets leave for it")
                continue
            try:
                self.path, self._lock_fd = create(parent, PREFIX)
            except OSError as error:
                reasons.append(f"{parent}: {error.strerror}")
                continue
            remove_stale(parent)
            return
        raise ConfigError("no place for the runtime directory: " + "; ".join(reasons))

    def close(self) -> None:
        """Remove the directory and all in it. May be called again."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> "RuntimeDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """Make a directory in the temporary one; if this process is killed, the next call removes it.

    *prefix* is of one kind of directory alone.
    """
    parent = Path(tempfile.gettempdir())
    path, lock_fd = create(parent, prefix)
    remove_stale(parent, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock_fd)


def candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories that may hold a runtime directory, best first."""
    # systemd gives several directories separated by colons when RuntimeDirectory= names several.
    systemd = environment.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    for name in (systemd, environment.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        if name:
            yield Path(name).absolute()


def remove_stale(parent: Path, prefix: str = PREFIX) -> list[Path]:
    """Remove directories under *parent* that ``create`` made and whose owner is dead; return them.

    Only real directories of this user count: in a shared /tmp anyone can make the others.
    """
    removed = []
    for path in parent.glob(f"{prefix}????????"):
        try:
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            lock_fd = _lock(path)
        except OSError:  # locked by its living owner, or removed by it just now
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock_fd)
        removed.append(path)
    return removed


def create(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a directory under *parent*, and lock it; return it and the lock, a file descriptor."""
    # Its name begins with a dot until the lock is held, so that no cleaner takes it for stale.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock_fd = _lock(unlocked)
    path = parent / unlocked.name.removeprefix(".")
    unlocked.rename(path)
    return path, lock_fd


def _lock(path: Path) -> int:
    lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise
    return lock_fd
