"""What the ranks of one machine exchange between their GPUs: small tensors by our kernels, the rest
by NCCL.

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
        self._memory: object = None
        self._group = group
        if self._sum_words:
            self._open(device)

    def _open(self, device: torch.device) -> None:
        """Have every rank's buffer mapped by all; without, if it cannot be for one of them."""
        problem, pointers = "", [0] * self.size
        try:
            pointers = self._map(device)
        except (RuntimeError, ImportError) as error:
            problem = str(error).strip().split("\n")[0]
        # This is also where all wait until every buffer is zeroed.
        works = torch.tensor([not problem], dtype=torch.int32, device=device)
        dist.all_reduce(works, dist.ReduceOp.MIN, group=self._group)
        if works.item():
            self._buffers = exchange.Buffers(pointers, self.rank, CAPACITY_WORDS, device)
            log.info("small sums over %d GPUs go through their memory", self.size)
        else:
            why = problem or "another rank cannot"
            log.warning("GPUs cannot write to one another's memory (%s): NCCL does all", why)

    def _map(self, device: torch.device) -> list[int]:
        from torch.distributed import _symmetric_memory as symmetric

        count = 2 * self.size * CAPACITY_WORDS
        buffer = symmetric.empty(count, dtype=torch.int64, device=device)
        buffer.zero_()
        torch.cuda.synchronize(device)
        group = self._group or dist.group.WORLD
        assert group is not None
        handle = symmetric.rendezvous(buffer, group.group_name)
        self._memory = buffer, handle
        offset = getattr(handle, "offset", 0)  # of the tensor in its allocation; new in torch
        return [pointer + offset for pointer in handle.buffer_ptrs]

    def sum(self, x: Tensor) -> Tensor:
        if self._buffers is None or not self._is_small(x):
            return self._library.sum(x)
        x = x.contiguous()
        exchange.sum_ranks(x, self._buffers, out=x, pdl=self._pdl)
        return x

    def adds(self, residual: Tensor) -> bool:
        return self._buffers is not None and self._is_small(residual)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._buffers is None or not self._is_small(x) or x.dtype != residual.dtype:
            return residual.add_(self.sum(x))
        x = x.contiguous()
        exchange.sum_ranks(x, self._buffers, out=residual, residual=residual, pdl=self._pdl)
        return residual

    def gather(self, x: Tensor, columns: int) -> Tensor:
        if self._buffers is None or exchange.words(x) > CAPACITY_WORDS:
            return self._library.gather(x, columns)
        out = x.new_empty(x.shape[0], columns)
        exchange.gather_ranks(x.contiguous(), self._buffers, out=out, pdl=self._pdl)
        return out

    def _is_small(self, x: Tensor) -> bool:
        has_whole_words = x.numel() * x.element_size() % 4 == 0
        is_known = x.dtype in exchange.KINDS and has_whole_words
        return is_known and exchange.words(x) <= self._sum_words
