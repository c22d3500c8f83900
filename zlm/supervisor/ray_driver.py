"""``python -m zlm.supervisor.ray_driver``: has Ray's actors run the nodes of an engine.

A ``Wanted`` comes on standard input and a ``Placed`` goes to standard output, a line of JSON each;
then the actors live until standard input is closed. Machines are a placement group of Ray's: one
bundle a node, each on another machine, the first on this one, which only keeps its GPUs.

A node that ends is run again, after a pause: why it ended is the head's to judge, which sees it go
and come. A machine that is lost is replaced by Ray, if it has another.
"""

import sys
import threading
import time
from logging import ERROR
from typing import Any

import msgspec

from zlm.config import ParallelOptions
from zlm.errors import ConfigError
from zlm.supervisor.ray_cluster import Placed, Wanted
from zlm.supervisor.ray_machine import Machine

PLACE_SECONDS = 60.0
PAUSE_SECONDS = 2.0  # before a node is run again


def num_nodes(parallel: ParallelOptions, num_gpus: int) -> int:
    """Return how many machines the workers take, each as many GPUs as this one has, *num_gpus*.

    Raises ConfigError if the workers are no multiple of that. --nnodes, if given, decides.
    """
    if parallel.nnodes > 1 or parallel.device == "cpu" or parallel.num_workers <= num_gpus:
        return parallel.nnodes
    if num_gpus == 0 or parallel.num_workers % num_gpus:
        raise ConfigError(
            f"Ray has {num_gpus} GPUs on this machine, which do not divide {parallel.num_workers} "
            "workers: say with --nnodes how many machines are to have as many each"
        )
    return parallel.num_workers // num_gpus


class Placement:
    """The actors, and the nodes that they run."""

    def __init__(self, wanted: Wanted) -> None:
        """Connect to the cluster that this machine is part of. Raises ConfigError."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "--distributed-executor-backend ray: Ray is not installed (pip install 'zlm[ray]')"
            ) from error
        self._ray = ray
        self._wanted = wanted
        try:
            ray.init(address="auto", namespace="zlm", log_to_driver=False, logging_level=ERROR)
        except ConnectionError as error:
            raise ConfigError(
                "--distributed-executor-backend ray: no Ray runs on this machine; 'ray start "
                "--head' begins a cluster, 'ray start --address HEAD:6379' joins one"
            ) from error

    def place(self) -> Placed:
        """Wait for room on as many machines as are needed. Raises ConfigError if there is none."""
        from ray.util.placement_group import placement_group

        ray, parallel = self._ray, self._wanted.config.parallel
        here = ray.get_runtime_context().get_node_id()
        (own,) = [each for each in ray.nodes() if each["NodeID"] == here]
        nnodes = num_nodes(parallel, int(own["Resources"].get("GPU", 0)))
        self._parallel = msgspec.structs.replace(
            parallel, nnodes=nnodes, master_addr=own["NodeManagerAddress"]
        )
        workers = self._parallel.workers_per_node
        self._gpus = workers if parallel.device == "cuda" else 0
        bundle = {"CPU": 1.0} | ({"GPU": float(self._gpus)} if self._gpus else {})
        machines = [each["Resources"] for each in ray.nodes() if each["Alive"]]
        able = sum(all(has.get(k, 0) >= n for k, n in bundle.items()) for has in machines)
        wanted = f"{nnodes} machines with a CPU and {self._gpus} GPUs each, of which this is one"
        if able < nnodes:
            raise ConfigError(f"Ray needs {wanted}: {able} of its {len(machines)} are so large")
        self._group = placement_group(
            [bundle] * nnodes,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": here}] + [{}] * (nnodes - 1),
        )
        if not self._group.wait(PLACE_SECONDS):
            raise ConfigError(f"Ray has no room on {wanted}: in use are {_used(ray)}")
        self._head = self._actor(0)
        gpus = ray.get(self._head.gpus.remote())
        return Placed(nnodes, self._parallel.master_addr or "", gpus)

    def run(self) -> None:
        """Run the nodes, each again when it ends; returns when the placement is closed."""
        for rank in range(1, self._parallel.nnodes):
            threading.Thread(target=self._keep, args=(rank,), daemon=True).start()

    def _keep(self, rank: int) -> None:
        parallel = msgspec.structs.replace(self._parallel, node_rank=rank)
        config = msgspec.structs.replace(self._wanted.config, parallel=parallel)
        content = msgspec.json.encode(config).decode()
        actor = self._actor(rank)
        while True:
            try:
                status, last = self._ray.get(actor.run.remote(content, self._wanted.environment))
                told = f"has ended with status {status} ({last})"
            except self._ray.exceptions.RayError as error:
                told = f"is lost: {type(error).__name__}"
            time.sleep(PAUSE_SECONDS)  # in which this process ends, if all leave
            print(f"zlm: Ray's node {rank} {told}; it is run again", file=sys.stderr, flush=True)

    def _actor(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
        actor = self._ray.remote(Machine).options(
            num_cpus=1, num_gpus=self._gpus, max_restarts=-1, scheduling_strategy=strategy
        )
        return actor.remote()

    def close(self) -> None:
        """Leave the cluster: the actors die with this, and their nodes with them."""
        self._ray.shutdown()


def _used(ray: Any) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    shown = (
        f"{total[kind] - free.get(kind, 0):.0f} of {total[kind]:.0f} {kind}s"
        for kind in ("CPU", "GPU")
        if kind in total
    )
    return " and ".join(shown)


def _answer(placed: Placed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(placed) + b"\n")
    sys.stdout.flush()


def main() -> int:
    """Place what standard input wants and keep it running until that is closed."""
    wanted = msgspec.json.decode(sys.stdin.buffer.readline(), type=Wanted)
    try:
        placement = Placement(wanted)
        found = placement.place()
    except ConfigError as error:
        _answer(Placed(error=error.message))
        return 1
    _answer(found)
    placement.run()
    sys.stdin.buffer.read()
    placement.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
