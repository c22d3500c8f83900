"""Bytes of files onto a device, as fast as page cache or disk give them.

A tensor's bytes are cut into pieces; a few threads read them side by side, each into a pinned
buffer of its own, from where the device copies them. One thread that copies out of the page cache
gives a few GB/s, a PCIe link takes tens: so the threads, not the link, set the pace, and a thread
may wait for its copy before it reads on. A cold disk sees several reads at once, which it likes.
Copies are made in the caller's stream: what the device did before with the same memory is over.

Knows nothing of formats. Works on the CPU as well (then a buffer is not pinned), for tests.
"""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor

from zlm.weights.raw import RawFile

PIECE_BYTES = 16 << 20
NUM_THREADS = 8


class Feeder:
    """Owns its threads and pinned buffers (128 MiB) until it is closed. Used by one thread."""

    def __init__(
        self,
        device: torch.device,
        *,
        piece_bytes: int = PIECE_BYTES,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="zlm-feed")
        pin = device.type == "cuda"
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(num_threads):
            self._buffers.put(torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pin))

    def read(self, file: RawFile, *spans: tuple[int, int]) -> Tensor:
        """Return the bytes of *file* in *spans*, each an offset and a number of bytes, one after
        another: uint8 on the device, complete.

        Raises ModelError, naming the file, if they cannot be read.
        """
        num_bytes = sum(length for _, length in spans)
        rest = target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        step, is_cuda = self._piece_bytes, self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if is_cuda else None
        pieces = []
        for offset, length in spans:
            for at, piece in enumerate(rest[:length].split(step)):
                place = offset + at * step
                pieces.append(self._threads.submit(self._fill, file, place, piece, stream))
            rest = rest[length:]
        for piece in pieces:
            piece.result()
        return target

    def close(self) -> None:
        """End the threads and free the buffers."""
        self._threads.shutdown()
        self._buffers = SimpleQueue()

    def _fill(
        self, file: RawFile, offset: int, target: Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        buffer = self._buffers.get()
        try:
            staged = buffer[: target.numel()]
            file.read_into(memoryview(staged.numpy().data), offset)
            # Models are built in inference mode, which is a thread's own.
            with torch.inference_mode(), torch.cuda.stream(stream):  # type: ignore[arg-type]
                target.copy_(staged, non_blocking=True)  # stream None: the CPU's
            if stream is not None:
                stream.synchronize()
        finally:
            self._buffers.put(buffer)
