"""What nodes know of one another before they talk."""

import socket
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


def test_a_secret_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch()
    for given, secret, words in (
        (options(), "", "--nnodes 2 needs a secret that all nodes share"),
        (
            options(),
            "short",
            "$ZLM_CLUSTER_KEY: a secret has at least 16 characters, this one has 5",
        ),
        (
            options(cluster_key_file=str(file)),
            SECRET,
            f"--cluster-key {file}: a secret has at least",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            cluster.read_secret(given, {cluster.VARIABLE: secret})
        assert words in caught.value.message


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_a_heads_name_that_no_other_finds(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    found = [(socket.AF_INET6 if ":" in address else socket.AF_INET, 0, 0, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=rf"--master-addr gpu1 is {address} on this machine"):
        cluster.await_head_address(options(master_addr="gpu1"))


def test_a_name_of_both_kinds_of_address_is_its_ipv4_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"fd00::1": socket.AF_INET6, "10.0.0.1": socket.AF_INET}
    found = [(kind, 0, 0, "", (address, 0)) for address, kind in kinds.items()]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert cluster.head_address(options(master_addr="gpu1")) == "10.0.0.1"


def test_the_interface_of_an_address() -> None:
    assert cluster.own_address("127.0.0.1") == "127.0.0.1"
    assert cluster.worker_environment("127.0.0.1") == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert cluster.interface("192.0.2.1") is None
