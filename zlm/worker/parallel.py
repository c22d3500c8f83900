"""The ranks of one engine: worker processes that each have a part of the model, and meet here.

``join`` gives a worker its ``Group``: with torch.distributed, NCCL between GPUs and Gloo between
CPUs. On one machine they meet through a file in the runtime directory, which nobody else may enter,
and talk over the loopback interface, shared memory and the GPUs' own links: nothing listens on the
network. On several they meet at torch's store on the head, and talk over the network. Every rank
gets the same steps in the same order, so every rank calls the same operations, and a rank that dies
or hangs takes the others down with it (``zlm.supervisor.keeper``).

Where they meet, and the settings of the libraries, are in ``zlm.worker.ranks``.
"""

import datetime
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from zlm.config import ParallelOptions
from zlm.errors import ConfigError
from zlm.ops.parallel import ALONE, Exchange, Parallel, Stage
from zlm.process import cluster
from zlm.worker.memory_plan import MemoryPlan

# A rank waits so long for another that is slower to load; a dead one is noticed by the supervisor.
TIMEOUT = datetime.timedelta(hours=1)

LEAVE_MS = 500  # for messages that are still on their way

# Its name since torch 2.13; before, the other one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """All workers, as the start of one needs them; ``parallel`` is what layers need."""

    def __init__(
        self,
        parallel: Parallel = ALONE,
        worker: int = 0,
        size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.parallel = parallel
        self.worker = worker
        self.size = size  # workers: ranks of all stages
        self._device = device

    @property
    def answers(self) -> bool:
        """Whether this worker's results are the engine core's: one of those that sample."""
        return self.parallel.stage.is_last and self.parallel.rank == 0

    def of_first(self, values: Sequence[int]) -> list[int]:
        """Return the first worker's *values*, of which all have as many."""
        numbers = self._numbers(values if self.worker == 0 else [0] * len(values))
        return self._together(numbers, dist.ReduceOp.SUM)

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the least of all workers' *values*, one by one."""
        return self._together(self._numbers(values), dist.ReduceOp.MIN)

    def least_blocks(self, plan: MemoryPlan) -> MemoryPlan:
        """Return *plan* with as many blocks in each KV group as all workers have."""
        return replace(plan, num_blocks=tuple(self.least(plan.num_blocks)))

    def any(self, value: bool) -> bool:
        """Tell whether *value* is true of any worker."""
        return bool(self._together(self._numbers([int(value)]), dist.ReduceOp.MAX)[0])

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def _together(self, numbers: Tensor, how: dist.ReduceOp.RedOpType) -> list[int]:
        if self.size > 1:
            dist.all_reduce(numbers, how)
        result: list[int] = numbers.tolist()
        return result


class TorchExchange:
    """See ``zlm.ops.parallel.Exchange``: torch.distributed's own operations."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        """*group*: None for that of all workers."""
        self.rank = rank
        self.size = size
        self.group = group

    def sum(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def adds(self, residual: Tensor) -> bool:
        return False

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self.sum(x))

    def gather(self, x: Tensor, columns: int) -> Tensor:
        rows, width = x.shape
        parts = x.new_empty(self.size, rows, width)
        _gather(parts.view(-1, width), x.contiguous(), group=self.group)
        out = x.new_empty(rows, columns)
        for rank, part in enumerate(parts):
            first = rank * width
            out[:, first : first + width] = part[:, : max(0, columns - first)]
        return out


class TorchStage(Stage):
    """See ``zlm.ops.parallel.Stage``: the workers before and after this one, of the same rank."""

    def __init__(self, index: int, count: int, worker: int, ranks: int) -> None:
        self.index = index
        self.count = count
        self._before, self._after = worker - ranks, worker + ranks
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, hidden: Tensor) -> Tensor:
        dist.recv(hidden, self._before)
        return hidden

    def send(self, hidden: Tensor) -> None:
        if hidden.device.type == "cuda":  # in the stream's order, which waits for nobody here
            dist.send(hidden.contiguous(), self._after)
            return
        # The next stage may still be at a step before: this one goes on meanwhile.
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        kept = hidden.clone()
        work = dist.isend(kept, self._after)
        assert work is not None, "this worker is part of the group"
        self._sending.append((work, kept))


def join(device: torch.device, worker: int, options: ParallelOptions, meeting: Path) -> Group:
    """Meet the other workers at the file *meeting* and return the group; waits for all of them.

    On several machines only its name counts. *device* is this worker's own, and set up. Raises
    ConfigError if torch's store cannot be opened on --master-port.
    """
    size, ranks = options.num_workers, options.tensor_parallel_size
    if size == 1:
        return Group()
    is_cpu = device.type == "cpu"
    dist.init_process_group(
        "gloo" if is_cpu else "nccl",
        store=_store(worker, options, meeting),
        rank=worker,
        world_size=size,
        timeout=TIMEOUT,
        device_id=None if is_cpu else device,
    )
    exchange = _exchange(device, worker, options) if ranks > 1 else None
    stage = None
    if options.pipeline_parallel_size > 1:
        stage = TorchStage(worker // ranks, options.pipeline_parallel_size, worker, ranks)
    return Group(Parallel(exchange, stage), worker, size, device)


def _store(worker: int, options: ParallelOptions, meeting: Path) -> Any:
    """Return where all workers meet; between machines the first of them has it for all."""
    if options.nnodes == 1:
        return dist.FileStore(str(meeting), options.num_workers)  # type: ignore[attr-defined]
    try:
        host, port, listening = cluster.head_address(options), options.master_port, None
        if worker == 0:  # left to itself the store listens on all interfaces
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family).detach()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=worker == 0, timeout=TIMEOUT, wait_for_workers=False,
            master_listen_fd=listening,
        )  # fmt: skip
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        where = f"--master-addr {options.master_addr} --master-port {options.master_port}"
        raise ConfigError(f"{where}: {reason}") from error
    return dist.PrefixStore(meeting.name, store)  # type: ignore[attr-defined]


def _exchange(device: torch.device, worker: int, options: ParallelOptions) -> Exchange:
    """Return the exchange between the ranks of this worker's stage."""
    ranks, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    group: dist.ProcessGroup | None = None
    for stage in range(stages if stages > 1 else 0):  # all workers make all groups
        members = list(range(stage * ranks, (stage + 1) * ranks))
        made = dist.new_group(members, timeout=TIMEOUT)
        group = made if worker in members else group
    library = TorchExchange(worker % ranks, ranks, group)
    if device.type == "cpu" or options.layers_span_nodes:
        return library
    from zlm.worker.gpu_exchange import GpuExchange  # needs Triton

    return GpuExchange(library, device, group)


def leave(context: zmq.Context) -> None:
    """End this process if it is in a group: to take that down by the book may wait for the others.

    What waits in *context* is sent first.
    """
    if dist.is_initialized():
        context.destroy(linger=LEAVE_MS)
        logging.shutdown()
        os._exit(0)
