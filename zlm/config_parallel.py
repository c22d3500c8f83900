"""The workers' part of the configuration: how many there are, and on which machines.

Part of ``zlm.config``, from where everybody takes it. Imports the errors and the server's part.
"""

from typing import Literal

import msgspec

from zlm.config_server import among, within
from zlm.errors import ConfigError

MAX_RANKS = 64
EXECUTORS = ("mp", "ray")
MASTER_PORT = 29501
PORTS = 3  # from --master-port on: torch's rendezvous, the supervisor, the engine core


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Workers and where they run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = 1  # workers that share each layer
    pipeline_parallel_size: int = 1  # stages, each of which has some of the layers
    cpu_threads: int | None = None  # compute threads of a CPU worker; None: physical cores
    nnodes: int = 1  # machines that have the workers together
    node_rank: int = 0  # which of them this is; number 0 is the head, which has all but workers
    master_addr: str | None = None  # the head's name or IP address, as the other nodes see it
    master_port: int = MASTER_PORT  # the first of PORTS ports of the head
    cluster_key_file: str | None = None  # holds the secret all nodes share; None: $ZLM_CLUSTER_KEY
    executor: Literal["mp", "ray"] = "mp"  # ray: Ray finds the other nodes and runs them
    headless: bool = False  # said of nodes other than the head, which have no front end anyway

    @property
    def num_workers(self) -> int:
        """Worker processes: worker number s * tensor_parallel_size + r is rank r of stage s."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def workers_per_node(self) -> int:
        """Worker processes of each node, which have numbers that follow one another."""
        return self.num_workers // self.nnodes

    @property
    def layers_span_nodes(self) -> bool:
        """Whether the ranks of a stage are on several machines."""
        return self.workers_per_node % self.tensor_parallel_size != 0

    def workers_of(self, node: int) -> range:
        """Return the numbers of the workers of a node."""
        return range(node * self.workers_per_node, (node + 1) * self.workers_per_node)


def check_parallel(parallel: ParallelOptions) -> None:
    """Raise ConfigError, naming the flag and the limit, if a value is wrong."""
    nodes, rank = parallel.nnodes, parallel.node_rank
    within("--tensor-parallel-size", parallel.tensor_parallel_size, 1, MAX_RANKS)
    within("--pipeline-parallel-size", parallel.pipeline_parallel_size, 1, MAX_RANKS)
    within("--cpu-threads", parallel.cpu_threads, 1, 1024)
    within("--nnodes", nodes, 1, MAX_RANKS)
    within("--node-rank", rank, 0, MAX_RANKS - 1)
    within("--master-port", parallel.master_port, 1, 65536 - PORTS)
    among("--distributed-executor-backend", parallel.executor, EXECUTORS)
    if parallel.executor == "ray" and rank:
        raise ConfigError("--distributed-executor-backend ray: it is Ray that runs other nodes")
    if rank >= nodes:
        raise ConfigError(f"--node-rank {rank} needs --nnodes {rank + 1} or more, got {nodes}")
    if nodes > 1 and parallel.num_workers % nodes:
        raise ConfigError(
            f"--nnodes {nodes} does not divide the {parallel.num_workers} workers of "
            f"--tensor-parallel-size {parallel.tensor_parallel_size} times "
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: each node has as many"
        )
    if nodes > 1 and not parallel.master_addr and parallel.executor == "mp":
        raise ConfigError(
            f"--nnodes {nodes} needs --master-addr, the name or address of node 0 on the network "
            "of the nodes"
        )
    if nodes == 1 and parallel.executor == "mp":
        for flag, is_given in (
            ("--master-addr", parallel.master_addr is not None),
            ("--master-port", parallel.master_port != MASTER_PORT),
            ("--cluster-key", parallel.cluster_key_file is not None),
        ):
            if is_given:
                raise ConfigError(f"{flag} is for several machines: it needs --nnodes 2 or more")
    if parallel.headless and rank == 0:
        raise ConfigError("--headless is for --node-rank 1 and up: node 0 answers HTTP")
