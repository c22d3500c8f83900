"""A child process for work that may eat time or memory in one operation: it can be killed.

``BoundedProcess`` owns the child: started at the first call, kept, and replaced after a kill; it
ends when its standard input closes. ``ChildSide`` is the other side. Knows nothing of the work.

Frames on both pipes: 4 bytes little-endian length, then the payload. The child's first frame, which
is empty, says that it can work.
"""

import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

START_SECONDS = 10.0  # to start the child, on top of the time of its first call


class BoundedProcess:
    """Runs ``python -m MODULE``. Not for use by several threads at once."""

    def __init__(self, module: str, first: Callable[[], bytes] | None = None) -> None:
        """*first* makes a frame that every new child gets before it says that it can work."""
        self._module = module
        self._first = first
        self._child: subprocess.Popen[bytes] | None = None

    def call(self, payload: bytes, seconds: float) -> bytes:
        """Return the child's answer to *payload*.

        Raises TimeoutError after *seconds*, EOFError if the child has died of it, most likely for
        want of memory; either way it is gone.
        """
        if self._child is None or self._child.poll() is not None:
            self._start()
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        limit = time.monotonic() + seconds
        try:
            _write(child.stdin, payload)
            return _read_until(child.stdout.fileno(), limit)
        except BrokenPipeError:
            self.close()
            raise EOFError from None
        except (EOFError, TimeoutError):
            self.close()
            raise

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-m", self._module]
        pipe = subprocess.PIPE
        # In a session of its own: a Ctrl-C in the terminal is the parent's business.
        self._child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        if self._first is not None:
            _write(self._child.stdin, self._first())
        try:
            _read_until(self._child.stdout.fileno(), time.monotonic() + START_SECONDS)
        except EOFError:  # not of what it was asked: it has not been asked yet
            raise OSError("it ended before it was ready, see what it wrote") from None


class ChildSide:
    """The child's ends of the pipes: standard input and output."""

    def __init__(self, memory_bytes: int) -> None:
        """Take no more than *memory_bytes* of address space from now on."""
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        self._reader = sys.stdin.buffer
        self._writer = os.fdopen(sys.stdout.fileno(), "wb", buffering=0)

    def receive(self) -> bytes | None:
        """Return the next frame, None at the end."""
        header = self._reader.read(4)
        return self._reader.read(int.from_bytes(header, "little")) if header else None

    def send(self, payload: bytes) -> None:
        """Send a frame."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(self._writer, payload)

    def die_after(self, seconds: float) -> None:
        """Have the kernel end this process unless a frame is sent within *seconds*.

        Should the parent be gone, nobody else would.
        """
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _write(pipe: IO[bytes], payload: bytes) -> None:
    view = memoryview(len(payload).to_bytes(4, "little") + payload)
    while view:
        view = view[pipe.write(view) :]


def _read_until(descriptor: int, limit: float) -> bytes:
    """Return the next frame; TimeoutError after *limit* (monotonic), EOFError at the end."""
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
            left = limit - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError
            received += chunk
    return bytes(received[4:])
