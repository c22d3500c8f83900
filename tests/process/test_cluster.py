"""What nodes know of one another before they talk."""

from pathlib import Path

import pytest

from zlm.config import ParallelOptions
from zlm.errors import ConfigError
from zlm.process import cluster

SECRET = "sixteen letters or more"


def options(**keywords: str) -> ParallelOptions:
    return ParallelOptions(tensor_parallel_size=2, nnodes=2, **keywords)  # type: ignore[arg-type]


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    key = cluster.read_secret(options(cluster_key_file=str(file)), {cluster.VARIABLE: "another"})
    assert key == cluster.read_secret(options(), {cluster.VARIABLE: SECRET})
    assert key != cluster.read_secret(options(), {cluster.VARIABLE: SECRET + "!"})


@pytest.mark.parametrize(
    ("secret", "words"),
    [("", "--nnodes 2 needs a secret that all nodes share"), ("short", "has 5. This makes one")],
)
def test_a_secret_that_is_none(secret: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster.read_secret(options(), {cluster.VARIABLE: secret})
    assert words in caught.value.message


def test_a_heads_name_that_no_other_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(cluster.socket, "getaddrinfo", lambda *_: found)
    with pytest.raises(ConfigError, match=r"--master-addr gpu1 is 127\.0\.1\.1 on this machine"):
        cluster.await_head_address(options(master_addr="gpu1"))


def test_the_interface_of_an_address() -> None:
    assert cluster.own_address("127.0.0.1") == "127.0.0.1"
    assert cluster.worker_environment("127.0.0.1") == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert cluster.interface("192.0.2.1") is None
