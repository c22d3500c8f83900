"""Byte ranges of GGUF files, read by position into memory that the caller owns. No torch.

Tensors are not mapped: a mapping keeps the file's pages in the process's memory beside the tensors
made from them, and turns a file that shrinks while it is read into a signal that kills. Reads go
front to back, with the kernel told what comes next, so a cold disk streams.
"""

import os
from types import TracebackType
from typing import Self

from zlm.errors import ModelError

MOST_BYTES_A_READ = 1 << 30  # Linux reads at most 2 GiB at once
READ_AHEAD_BYTES = 64 << 20


class RawFile:
    """One open weight file. Owns its descriptor; any thread may read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* with the bytes from *offset* on; ModelError if they are not there."""
        end = offset + len(buffer)
        os.posix_fadvise(self._descriptor, end, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(buffer):
            part = buffer[done : done + MOST_BYTES_A_READ]
            try:
                count = os.preadv(self._descriptor, [part], offset + done)
            except OSError as error:
                raise ModelError(f"cannot read {self.path}: {error.strerror or error}") from error
            if count == 0:
                raise ModelError(f"{self.path} is cut short: it ends before byte {end}")
            done += count

    def close(self) -> None:
        """Close the file; it cannot be read any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
