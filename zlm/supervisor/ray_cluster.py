"""Machines that Ray finds for an engine: --distributed-executor-backend ray.

Ray chooses the machines, and zlm is what runs there: ``zlm.supervisor.ray_driver``, a process of
its own, has an actor on each of them be the supervisor of a node, as ``zlm serve --node-rank N``
would be. This machine is node 0. What passes between nodes are zlm's own messages, with its keys.

Knows how to start that process and how to end it; it is the driver that knows Ray.
"""

import contextlib
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from zlm.config import Config, ServerOptions
from zlm.errors import ConfigError
from zlm.process import cluster
from zlm.process.linux import kill_when_parent_ends
from zlm.supervisor.device import find_device

END_SECONDS = 10.0  # for the driver to end its actors

logger = logging.getLogger(__name__)


class Wanted(msgspec.Struct, frozen=True):
    """What the driver is to place. ``environment`` is for the nodes."""

    config: Config
    environment: dict[str, str]


class Placed(msgspec.Struct, frozen=True):
    """Where: ``gpus`` are those of this machine; or what is wrong."""

    nnodes: int = 0
    master_addr: str = ""
    gpus: list[str] = []
    error: str = ""


@contextlib.contextmanager
def placed(config: Config) -> Iterator[Config]:
    """Have Ray place the workers of *config*; yield what node 0 is to run meanwhile.

    Without Ray that is *config*. Raises ConfigError if Ray is not installed, does not run, or has
    no room.
    """
    parallel, server = config.parallel, config.server
    if parallel.executor != "ray":
        yield config
        return
    if parallel.master_addr is not None:
        raise ConfigError("--master-addr: --distributed-executor-backend ray takes Ray's own")
    device = find_device(parallel.device)
    environment = {}
    if os.environ.get("RAY_USE_TLS") == "1" and parallel.cluster_key_file is None:
        # Ray encrypts what it sends: so it may carry the secret that nodes share.
        os.environ.setdefault(cluster.VARIABLE, secrets.token_urlsafe())
        environment[cluster.VARIABLE] = os.environ[cluster.VARIABLE]
    limits = ServerOptions(  # the nodes' part: the rest holds keys
        health_timeout_seconds=server.health_timeout_seconds,
        hang_timeout_seconds=server.hang_timeout_seconds,
        startup_timeout_seconds=server.startup_timeout_seconds,
    )
    parallel = msgspec.structs.replace(parallel, device=device)
    wanted = Wanted(msgspec.structs.replace(config, parallel=parallel, server=limits), environment)
    command = [sys.executable, "-m", "zlm.supervisor.ray_driver"]
    driver = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=kill_when_parent_ends,
        start_new_session=True,  # Ctrl-C is the supervisor's to take
    )
    assert driver.stdin is not None and driver.stdout is not None
    try:
        driver.stdin.write(msgspec.json.encode(wanted) + b"\n")
        driver.stdin.flush()
        line = driver.stdout.readline()
        if not line:
            raise ConfigError(f"Ray's driver has ended with status {driver.wait()}")
        found = msgspec.json.decode(line, type=Placed)
        if found.error:
            raise ConfigError(found.error)
        if found.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(found.gpus)
        if found.nnodes == 1:
            logger.warning(
                "--distributed-executor-backend ray: --tensor-parallel-size and "
                "--pipeline-parallel-size take no more than this machine, so Ray runs nothing "
                "elsewhere; --nnodes N would have N machines share them"
            )
        where = {"nnodes": found.nnodes, "master_addr": found.master_addr}
        yield msgspec.structs.replace(config, parallel=msgspec.structs.replace(parallel, **where))
    finally:
        driver.stdin.close()
        try:
            driver.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
