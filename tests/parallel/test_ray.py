"""--distributed-executor-backend ray: a cluster of Ray's, two "machines" on this one.

A cluster takes half a minute to begin on two cores, so the tests that need one are slow ones.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import Server, eventually_true, free_port
from tiny import tiny_checkpoint

from zlm.config import Config, ModelOptions, ParallelOptions
from zlm.errors import ConfigError
from zlm.supervisor.ray_cluster import placed
from zlm.supervisor.ray_driver import num_nodes

FLAGS = [
    "--device", "cpu", "--cpu-threads", "1", "--max-model-len", "256", "--max-num-seqs", "4",
    "--num-gpu-blocks-override", "60", "--served-model-name", "smol",
]  # fmt: skip
RAY = ["-tp", "2", "--nnodes", "2", "--distributed-executor-backend", "ray"]
NODE = "zlm.supervisor.ray_machine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("ray") / "model", "llama")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZLM_CLUSTER_KEY", "a secret of the tests, of no other use")  # Ray inherits it
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 1, "include_dashboard": False}
        cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield
        cluster.shutdown()


def nodes() -> list[int]:
    """Return the supervisors of nodes that Ray's actors run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if NODE.encode() in words:
            found.append(int(folder.name))
    return found


def serve(model: Path, folder: Path, *flags: str) -> Server:
    port = ["--master-port", str(free_port())] if flags else []
    return Server(model, folder / "log", [*FLAGS, *flags, *port])


def tokens(server: Server) -> list[int]:
    answer = server.complete("The quick brown fox", max_tokens=16, return_token_ids=True)
    return answer.json["choices"][0]["token_ids"]


def refused(model: Path, folder: Path, *flags: str) -> str:
    """Return the last line of a server that cannot start."""
    server = serve(model, folder, *flags)
    try:
        assert server.process.wait(120) == 1
    finally:
        server.stop()
    return server.log.read_text().splitlines()[-1]


def test_no_ray_is_said(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test: there is a cluster from the next one on."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pytest.importorskip("ray", reason="Ray is not installed")
    assert "no Ray runs on this machine" in refused(model, tmp_path, *RAY)


@pytest.mark.slow
def test_ray_places_the_nodes_and_runs_them_again(
    cluster: None, model: Path, tmp_path: Path
) -> None:
    with serve(model, tmp_path) as alone:
        expected = tokens(alone)
    with serve(model, tmp_path, *RAY) as server:
        assert tokens(server) == expected
        (before,) = nodes()
        os.kill(before, signal.SIGKILL)
        assert eventually_true(lambda: server.health() != 200, 30), "its worker is gone"
        assert eventually_true(lambda: server.health() == 200, 60), server.log.read_text()[-3000:]
        assert tokens(server) == expected
        assert nodes() not in ([], [before])
    assert server.log.read_text().count("it is run again") == 1, "not when all leave"
    assert eventually_true(lambda: not nodes(), 20), "they leave with their actors"


@pytest.mark.slow
def test_all_on_this_machine_is_said(cluster: None, model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path, "-pp", "2", *RAY[-2:]) as server:
        assert "so Ray runs nothing elsewhere; --nnodes N would" in server.log.read_text()


@pytest.mark.slow
def test_too_few_machines_are_said(cluster: None, model: Path, tmp_path: Path) -> None:
    last = refused(model, tmp_path, "-tp", "3", "--nnodes", "3", *RAY[-2:])
    assert "Ray needs 3 machines" in last and "2 of its 2 are so large" in last


@pytest.mark.parametrize(
    ("gpus", "ranks", "given", "nodes"), [(8, 8, 1, 1), (4, 8, 1, 2), (4, 8, 4, 4), (8, 2, 1, 1)]
)
def test_as_many_machines_as_the_gpus_take(gpus: int, ranks: int, given: int, nodes: int) -> None:
    parallel = ParallelOptions(device="cuda", tensor_parallel_size=ranks, nnodes=given)
    assert num_nodes(parallel, gpus) == nodes


def test_the_head_is_where_ray_says() -> None:
    parallel = ParallelOptions(executor="ray", master_addr="10.0.0.1")
    config = Config(model=ModelOptions(model="m"), parallel=parallel)
    with pytest.raises(ConfigError, match="--master-addr"), placed(config):
        pass


def test_gpus_that_do_not_divide_the_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        num_nodes(ParallelOptions(device="cuda", tensor_parallel_size=6), 4)
