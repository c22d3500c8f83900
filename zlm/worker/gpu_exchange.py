"""What the ranks of one machine exchange between their GPUs: small tensors by our kernels, between
two ranks sums of any size, the rest by NCCL.

The kernels (``zlm.kernels.exchange``) write to the other GPUs' memory, which torch's symmetric
memory maps; without NVLink or its permission the library does everything. All of it goes to the
current stream and can be captured in a graph.
"""

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from zlm.kernels import exchange
from zlm.ops.parallel import Exchange

log = logging.getLogger("zlm.worker")

CAPACITY_WORDS = 1 << 19  # of a buffer: 2 MiB, each word of which takes 16 bytes for every rank
# Bytes of a sum up to which the kernel is used, by ranks: each rank sends all it has to all others.
# With more ranks than these NCCL sums everything.
SUM_BYTES = {2: 1 << 21, 3: 1 << 19, 4: 1 << 19, 6: 1 << 18, 8: 1 << 18}
HALF_BYTES = 1 << 26  # of a buffer for large sums; what is larger goes in pieces
OVERLAP = (9, 0)  # compute capability from which a kernel may start before the last has ended


class GpuExchange:
    """See ``zlm.ops.parallel.Exchange``. Owns the buffers that other ranks write to."""

    def __init__(
        self, library: Exchange, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        """Meet the other ranks of *group* (None: all workers), whose operations *library* is."""
        self.rank, self.size = library.rank, library.size
        self._library = library
        self._pdl = torch.cuda.get_device_capability(device) >= OVERLAP
        self._sum_words = SUM_BYTES.get(self.size, 0) // 4
        self._buffers: exchange.Buffers | None = None
        self._large: exchange.LargeBuffers | None = None
        self._memory: list[object] = []
        self._group = group
        if self._sum_words:
            self._open(device)

    def _open(self, device: torch.device) -> None:
        """Have every rank's buffer mapped by all; without, if it cannot be for one of them."""
        problem, pointers, large = "", [0] * self.size, [0] * self.size
        try:
            pointers = self._map(2 * self.size * CAPACITY_WORDS * 8, device)
            if self.size == 2:
                large = self._map(exchange.large_bytes(HALF_BYTES), device)
        except (RuntimeError, ImportError) as error:
            problem = str(error).strip().split("\n")[0]
        # This is also where all wait until every buffer is zeroed.
        works = torch.tensor([not problem], dtype=torch.int32, device=device)
        dist.all_reduce(works, dist.ReduceOp.MIN, group=self._group)
        if works.item():
            self._buffers = exchange.Buffers(pointers, self.rank, CAPACITY_WORDS, device)
            if self.size == 2:
                self._large = exchange.LargeBuffers(large, self.rank, HALF_BYTES, device)
            kind = "" if self._large else "small "
            log.info("%ssums over %d GPUs go through their memory", kind, self.size)
        else:
            why = problem or "another rank cannot"
            log.warning("GPUs cannot write to one another's memory (%s): NCCL does all", why)

    def _map(self, num_bytes: int, device: torch.device) -> list[int]:
        """Return the addresses, here, of a buffer of *num_bytes* of each rank's."""
        from torch.distributed import _symmetric_memory as symmetric

        buffer = symmetric.empty(num_bytes // 4, dtype=torch.int32, device=device)
        buffer.zero_()
        torch.cuda.synchronize(device)
        group = self._group or dist.group.WORLD
        assert group is not None
        handle = symmetric.rendezvous(buffer, group.group_name)
        self._memory.append((buffer, handle))
        offset = getattr(handle, "offset", 0)  # of the tensor in its allocation; new in torch
        return [pointer + offset for pointer in handle.buffer_ptrs]

    def sum(self, x: Tensor) -> Tensor:
        if not self.adds(x):
            return self._library.sum(x)
        x = x.contiguous()
        self._sum(x, x, None)
        return x

    def adds(self, residual: Tensor) -> bool:
        return self._is_small(residual) if self._large is None else self._is_known(residual)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if x.dtype != residual.dtype or not self.adds(x):
            return residual.add_(self.sum(x))
        self._sum(x.contiguous(), residual, residual)
        return residual

    def _sum(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        if self._is_small(x):
            assert self._buffers is not None
            exchange.sum_ranks(x, self._buffers, out=out, residual=residual, pdl=self._pdl)
        else:
            assert self._large is not None
            exchange.sum_two_ranks(x, self._large, out=out, residual=residual, pdl=self._pdl)

    def gather(self, x: Tensor, columns: int) -> Tensor:
        if self._buffers is None or exchange.words(x) > CAPACITY_WORDS:
            return self._library.gather(x, columns)
        out = x.new_empty(x.shape[0], columns)
        exchange.gather_ranks(x.contiguous(), self._buffers, out=out, pdl=self._pdl)
        return out

    def _is_small(self, x: Tensor) -> bool:
        is_known = self._buffers is not None and self._is_known(x)
        return is_known and exchange.words(x) <= self._sum_words

    @staticmethod
    def _is_known(x: Tensor) -> bool:
        return x.dtype in exchange.KINDS and x.numel() * x.element_size() % 4 == 0
